"""How a frame is to be shown: its size in square pixels, turned and mirrored."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from av import VideoFrame

from slowfast_lara.data.orientation import Orientation

# Pixels that are longer than this come from a damaged header.
_MAX_PIXEL_ASPECT = 4


def make_upright(frame: Any, orientation: Orientation) -> Any:
    """The upright frame of one in yuv420p with even sides."""
    if orientation == Orientation():
        return frame
    width, height = frame.width, frame.height
    flat = frame.to_ndarray().reshape(-1)
    planes = np.split(flat, [width * height, width * height * 5 // 4])
    shapes = [(height, width), *[(height // 2, width // 2)] * 2]
    turned = [orientation.upright(plane.reshape(shape)) for plane, shape in zip(planes, shapes)]
    rows = turned[0].shape[1]
    packed = np.concatenate([plane.reshape(-1) for plane in turned]).reshape(-1, rows)
    upright = VideoFrame.from_ndarray(packed, format="yuv420p")
    upright.colorspace, upright.color_range = frame.colorspace, frame.color_range
    return upright


def target_size(
    width: int, height: int, pixel_aspect: Fraction | None, short_side: int
) -> tuple[int, int]:
    """Even width and height in square pixels, no longer than they were.

    `pixel_aspect` is width by height of a pixel: the longer one of its sides shrinks.
    """
    one, aspect = Fraction(1), Fraction(pixel_aspect or 1)
    if not Fraction(1, _MAX_PIXEL_ASPECT) <= aspect <= _MAX_PIXEL_ASPECT:
        aspect = one
    square_width, square_height = width * min(aspect, one), height * min(1 / aspect, one)
    scale = min(short_side / min(square_width, square_height), one)
    return _even(square_width * scale, width), _even(square_height * scale, height)


def _even(length: Fraction, longest: int) -> int:
    """The nearest even number, but none above `longest`; nothing is below 2."""
    nearest = 2 * round(length / 2)
    return max(2, nearest if nearest <= longest else nearest - 2)
