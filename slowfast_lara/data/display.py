"""Decoded frames as a player displays them: RGB, upright, with square pixels.

All readers of video files use `RgbConverter`, so that training, testing, streaming and
visualization get upright frames with square pixels, which `data prepare` also writes.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import av
import numpy as np
from av.sidedata.sidedata import Type as SideData
from av.video.reformatter import Interpolation, VideoReformatter

# Limit against damaged headers, which may declare any size; 8K video has 33 million pixels.
MAX_PIXELS = 8192 * 8192
# Frames are scaled to a given short side, so memory grows with the aspect ratio. Up to this ratio,
# a test frame of the default size (uint8) takes less memory than its three crops (float32). The
# widest screens have 32:9.
MAX_ASPECT = 8
# More extreme sample aspect ratios come from damaged headers and are ignored.
_MAX_SAMPLE_ASPECT = 4
# From PyAV 17 on, a colour conversion uses one thread per core unless `threads` is given.
ONE_THREAD = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}


class Orientation(NamedTuple):
    """Operations that make a frame upright: first the transpose, then the mirroring."""

    transpose: bool = False
    mirror_x: bool = False
    mirror_y: bool = False

    @staticmethod
    def of(frame: Any) -> Orientation:
        """Orientation from the frame's display matrix, rounded to the nearest quarter turn."""
        try:
            matrix = frame.side_data.get(SideData.DISPLAYMATRIX)
        except ValueError:  # PyAV does not define the type of some side data, e.g. EXIF
            return _QUARTER_TURNS[round(frame.rotation / 90) % 4]
        if matrix is None:
            return Orientation()
        # The matrix maps pixel (x, y) to (a x + c y, b x + d y); y points downwards.
        a, b, _, c, d = (int(value) for value in np.frombuffer(bytes(matrix), np.int32)[:5])
        if abs(b) + abs(c) > abs(a) + abs(d):
            return Orientation(True, c < 0, b < 0)
        return Orientation(False, a < 0, d < 0)

    def upright(self, pixels: np.ndarray) -> np.ndarray:
        """Upright copy of `pixels` [H, W] or [H, W, 3]; `pixels` itself if already upright."""
        if self == Orientation():
            return pixels
        pixels = pixels.swapaxes(0, 1) if self.transpose else pixels
        pixels = pixels[:: -1 if self.mirror_y else 1, :: -1 if self.mirror_x else 1]
        return np.ascontiguousarray(pixels)


# Orientations, indexed by the number of counter-clockwise quarter turns.
_QUARTER_TURNS = (
    Orientation(),
    Orientation(True, False, True),
    Orientation(False, True, True),
    Orientation(True, True, False),
)


def square_pixel_size(
    width: int, height: int, sample_aspect: Fraction | None
) -> tuple[Fraction, Fraction]:
    """Width and height of a frame with square pixels, before rotation.

    `sample_aspect` is the sample aspect ratio: width / height of a pixel. A frame with wide pixels
    gets a smaller height, one with tall pixels a smaller width. Neither side grows.
    """
    aspect, one = Fraction(sample_aspect or 1), Fraction(1)
    if not Fraction(1, _MAX_SAMPLE_ASPECT) <= aspect <= _MAX_SAMPLE_ASPECT:
        aspect = one
    return width * min(aspect, one), height * min(1 / aspect, one)


@lru_cache
def display_size(width: int, height: int, sample_aspect: Fraction | None) -> tuple[int, int]:
    """`square_pixel_size` in whole pixels; raises a ValueError as `check_size` does."""
    check_size(height, width)
    square_width, square_height = map(round, square_pixel_size(width, height, sample_aspect))
    check_size(square_height, square_width)
    return square_width, square_height


def check_size(height: int, width: int) -> None:
    """Raise a ValueError if frames of this size are empty or would take too much memory."""
    if min(height, width) < 1:
        raise ValueError(f"frames of {width}x{height} pixels are empty")
    shape = f"frames of {width}x{height} pixels"
    if height * width > MAX_PIXELS:
        raise ValueError(f"{shape} are too large; at most {MAX_PIXELS} pixels are allowed")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(f"{shape} are too narrow; the aspect ratio may be at most {MAX_ASPECT}:1")


class RgbConverter:
    """Converts decoded frames of a stream to RGB, upright and with square pixels.

    The first frame determines the orientation. Use one object for all frames of a video: set-up
    takes longer than converting a frame.
    """

    def __init__(self, stream: Any) -> None:
        self._reformatter = VideoReformatter()
        self._sample_aspect = stream.sample_aspect_ratio
        self._orientation: Orientation | None = None

    def __call__(self, frame: Any) -> np.ndarray:
        """Convert a frame to uint8 RGB [H, W, 3]."""
        width, height = display_size(frame.width, frame.height, self._sample_aspect)
        is_scaled = (width, height) != (frame.width, frame.height)
        # Scale bicubically, as `data prepare` does. Without scaling, BICUBIC would only alter the
        # chroma upsampling.
        options = {"interpolation": Interpolation.BICUBIC} if is_scaled else {}
        rgb = self._reformatter.reformat(frame, width, height, "rgb24", **options, **ONE_THREAD)
        self._orientation = self._orientation or Orientation.of(frame)
        return self._orientation.upright(rgb.to_ndarray())
