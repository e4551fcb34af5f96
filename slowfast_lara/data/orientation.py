"""Display orientation of video frames: phones store sideways frames and a display matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from av.sidedata.sidedata import Type as SideData


class Orientation(NamedTuple):
    """Operations that make a frame upright: first the transpose, then the mirroring."""

    transpose: bool = False
    mirror_x: bool = False
    mirror_y: bool = False

    @staticmethod
    def of(frame: Any) -> Orientation:
        """Orientation by the frame's display matrix, rounded to the nearest quarter turn."""
        matrix = frame.side_data.get(SideData.DISPLAYMATRIX)
        if matrix is None:
            return Orientation()
        # The matrix displays pixel (x, y) at (a x + c y, b x + d y); y points downwards.
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
