"""Sources of frames: a video file, image files, a folder of them, or the frames themselves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import cv2
import numpy as np
from PIL import Image

from slowfast_lara.data.decode import (
    Choose,
    Frames,
    KeptFrames,
    Place,
    check_size,
    opened,
    order_of,
    read_all,
    read_span,
    rgb_frames,
)
from slowfast_lara.data.packet_index import PacketIndex
from slowfast_lara.errors import DecodeError, first_line


@dataclass(frozen=True)
class FrameArray:
    """Frames in memory, uint8 RGB [T,H,W,3]; their rate, if it is known."""

    pixels: np.ndarray
    fps: float | None = None

    def __post_init__(self) -> None:
        shape, kind = self.pixels.shape, self.pixels.dtype
        if len(shape) != 4 or shape[3] != 3 or not shape[0] or kind != np.uint8:
            raise DecodeError(
                f"frames {list(shape)} of {kind} are given; uint8 [T, H, W, 3] is expected"
            )
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise DecodeError(f"the frames' fps is {self.fps}; a positive number is expected")
        try:
            check_size(*shape[1:3])
        except ValueError as error:
            raise DecodeError(f"the frames given: {error}") from None


# The path of a video file or of a folder of images, or the paths of image files.
Files = str | Sequence[str]
Source = Files | FrameArray
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def read_frames(
    source: Source,
    choose: Choose,
    place: Place,
    *,
    whole: bool,
    default_fps: float = 30,
    threads: int = 1,
    index: PacketIndex | None = None,
) -> Frames:
    """The chosen frames; `default_fps` is for sources that do not say their own.

    `whole`: decode all of a video file, to choose by the number of frames it really has.
    Otherwise an `index` saves scanning it each time.
    """
    if isinstance(source, FrameArray):
        indices = choose(len(source.pixels), source.fps or default_fps)
        return _kept(indices, source.pixels.__getitem__, place)
    images = _image_files(source)
    if images is None:
        read = read_all if whole else partial(read_span, index=index)
        return read(str(source), choose, place, default_fps=default_fps, threads=threads)
    return _kept(choose(len(images), default_fps), lambda index: read_image(images[index]), place)


def _kept(indices: np.ndarray, frame: Callable[[int], np.ndarray], place: Place) -> Frames:
    distinct = np.unique(indices)
    kept = KeptFrames(len(distinct), place)
    for index in distinct:
        kept.add(frame(index))
    return Frames(kept.pixels, order_of(indices))


@contextmanager
def open_frames(
    source: Source, default_fps: float = 30
) -> Iterator[tuple[float, Iterator[np.ndarray]]]:
    """Frames per second, and all frames one by one, uint8 RGB [H, W, 3]."""
    if isinstance(source, FrameArray):
        yield float(source.fps or default_fps), iter(source.pixels)
        return
    images = _image_files(source)
    if images is not None:
        yield float(default_fps), map(read_image, images)
        return
    with opened(str(source), 1) as (container, stream):
        yield float(stream.average_rate or default_fps), rgb_frames(container, stream)


def _image_files(source: Files) -> Sequence[str] | None:
    """The images that make up the source; None for a video file."""
    if not isinstance(source, str):
        return source
    return list_images(source) if os.path.isdir(source) else None


def list_images(folder: str) -> list[str]:
    """The images of a folder, 2.jpg before 10.jpg."""
    try:
        names = [name for name in os.listdir(folder) if name.lower().endswith(IMAGE_SUFFIXES)]
    except OSError as error:
        raise DecodeError(f"{folder}: {error.strerror}") from None
    if not names:
        raise DecodeError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)}) in it")
    names.sort(
        key=lambda name: [
            (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
        ]
    )
    return [os.path.join(folder, name) for name in names]


def read_image(path: str) -> np.ndarray:
    if not os.path.isfile(path):  # OpenCV would wait for ever for a FIFO
        raise DecodeError(f"{path}: no such file")
    try:
        with Image.open(path) as header:  # reads no pixels, which OpenCV does at once
            check_size(header.height, header.width)
        image = cv2.imread(path, cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise DecodeError(f"{path}: {error.err}") from None
    except Image.UnidentifiedImageError:
        raise DecodeError(f"{path}: not an image that can be read") from None
    except Exception as error:  # Pillow's readers raise anything on a damaged header
        raise DecodeError(f"{path}: {first_line(error)}") from None
    if image is None:
        raise DecodeError(f"{path}: not an image that can be read")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
