"""Frames of a video that was extracted to image files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import cv2
import numpy as np

from slowfast_lara.data.decode import Choose, Frames, Kept, Place
from slowfast_lara.errors import DecodeError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def list_images(folder: str) -> list[str]:
    """The images of a folder; numbers in their names count as numbers."""
    try:
        names = [name for name in os.listdir(folder) if name.lower().endswith(IMAGE_SUFFIXES)]
    except OSError as error:
        raise DecodeError(f"{folder}: {error.strerror}") from None
    if not names:
        raise DecodeError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)}) in it")
    names.sort(
        key=lambda name: [
            (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
        ]
    )
    return [os.path.join(folder, name) for name in names]


def read_images(paths: Sequence[str], choose: Choose, place: Place, fps: float) -> Frames:
    """The chosen ones of the frames."""
    indices = choose(len(paths), fps)
    distinct, order = np.unique(indices, return_inverse=True)
    kept = Kept(len(distinct), place)
    for index in distinct:
        kept.add_rgb(_read_rgb(paths[index]))
    return Frames(kept.pixels, order.reshape(indices.shape))


def _read_rgb(path: str) -> np.ndarray:
    if not os.path.isfile(path):  # OpenCV would wait for a FIFO
        raise DecodeError(f"{path}: no such file")
    try:
        image = cv2.imread(path, cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise DecodeError(f"{path}: {error.err}") from None
    if image is None:
        raise DecodeError(f"{path}: not an image that can be read")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
