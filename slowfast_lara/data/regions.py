"""Regions of frames, cropped and resized into one array."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np


class Region(NamedTuple):
    """A rectangle of a frame, and the size to resize it to."""

    top: int
    left: int
    height: int
    width: int
    out_height: int
    out_width: int


# (height, width) of a frame -> the region to keep.
CropFn = Callable[[int, int], Region]


class FrameBuffer:
    """Array of cropped and resized RGB frames, filled in the order of `add`."""

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
        top, left, height, width, out_height, out_width = self._region
        if self.count == 0:
            self.pixels = np.empty((self._capacity, out_height, out_width, 3), np.uint8)
        region, out = image[top : top + height, left : left + width], self.pixels[self.count]
        if region.shape == out.shape:
            out[:] = region
        else:
            cv2.resize(region, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
        self.count += 1
