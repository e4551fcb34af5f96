"""Regions of frames, cropped and resized into one array."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image


class Region(NamedTuple):
    """A rectangle of a frame, and the size to resize it to, with or without antialiasing."""

    top: int
    left: int
    height: int
    width: int
    out_height: int
    out_width: int
    antialias: bool = False

    def cut(self, image: np.ndarray, out: np.ndarray) -> None:
        """Write the region of an image to `out`, resized bilinearly to the size of `out`."""
        pixels = image[self.top : self.top + self.height, self.left : self.left + self.width]
        size = out.shape[1::-1]
        if pixels.shape == out.shape:
            out[:] = pixels
        elif self.antialias:
            out[:] = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
        else:
            cv2.resize(pixels, size, dst=out, interpolation=cv2.INTER_LINEAR)


# (height, width) of a frame -> the region to keep.
CropFn = Callable[[int, int], Region]


class FrameBuffer:
    """Array of cropped and resized RGB frames; `add` appends a frame."""

    def __init__(self, capacity: int, crop: CropFn) -> None:
        self.pixels = np.empty((0, 0, 0, 3), np.uint8)
        self.count = 0
        self._capacity = capacity
        self._crop = crop
        self._frame_size = (0, 0)

    def add(self, image: np.ndarray) -> None:
        # The frame size may change within a video: the region depends on the size of each frame,
        # and all regions are resized to the output size of the first region.
        height, width = image.shape[:2]
        if (height, width) != self._frame_size:
            self._frame_size, self._region = (height, width), self._crop(height, width)
        if self.count == 0:
            size = (self._region.out_height, self._region.out_width)
            self.pixels = np.empty((self._capacity, *size, 3), np.uint8)
        self._region.cut(image, self.pixels[self.count])
        self.count += 1
