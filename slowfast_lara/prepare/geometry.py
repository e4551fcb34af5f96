"""Frame geometry of prepared videos: upright orientation, square pixels, even sizes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from av import VideoFrame

from slowfast_lara.data.display import Orientation, square_pixel_size


def make_upright(frame: Any, orientation: Orientation) -> Any:
    """Rotate and mirror a yuv420p frame of even width and height."""
    if orientation == Orientation():
        return frame
    width, height = frame.width, frame.height
    flat = frame.to_ndarray().reshape(-1)
    planes = np.split(flat, [width * height, width * height * 5 // 4])
    shapes = [(height, width), *[(height // 2, width // 2)] * 2]
    rotated = [orientation.upright(plane.reshape(shape)) for plane, shape in zip(planes, shapes)]
    packed = np.concatenate([plane.reshape(-1) for plane in rotated])
    packed = packed.reshape(-1, rotated[0].shape[1])
    upright = VideoFrame.from_ndarray(packed, format="yuv420p")
    upright.colorspace, upright.color_range = frame.colorspace, frame.color_range
    return upright


def target_size(
    width: int, height: int, sample_aspect: Fraction | None, short_side: int
) -> tuple[int, int]:
    """Even (width, height) of a frame scaled down to `short_side`, with square pixels.

    `sample_aspect` is that of `square_pixel_size`. The frame is never scaled up.
    """
    square_width, square_height = square_pixel_size(width, height, sample_aspect)
    scale = min(short_side / min(square_width, square_height), Fraction(1))
    return _even(square_width * scale, width), _even(square_height * scale, height)


def _even(length: Fraction, maximum: int) -> int:
    """The even number nearest to `length`, at most `maximum` and at least 2."""
    nearest = 2 * round(length / 2)
    return max(2, nearest if nearest <= maximum else nearest - 2)
