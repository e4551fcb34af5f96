"""Geometry of a view's tokens: patches, query points and attention paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from fvcore.common.config import CfgNode

from slowfast_lara.errors import InputError


class QueryPoint(NamedTuple):
    """A pixel in a frame of a view; x increases to the right, y downwards; frames start at 0."""

    x: int
    y: int
    frame: int


@dataclass(frozen=True)
class TokenGrid:
    """Size and number of a view's patches. Tokens are ordered by frame, then row, then column."""

    num_frames: int  # temporal tokens
    side: int  # patches in a row or column
    patch: int  # pixels
    patch_frames: int

    @classmethod
    def from_config(cls, cfg: CfgNode) -> TokenGrid:
        vit = cfg.VIT
        side = cfg.DATA.TEST_CROP_SIZE // vit.PATCH_SIZE
        return cls(vit.TEMPORAL_RESOLUTION, side, vit.PATCH_SIZE, vit.PATCH_SIZE_TEMP)

    def token(self, point: QueryPoint) -> int:
        """The index of the token whose patch contains a point."""
        pixels, frames = self.side * self.patch, self.num_frames * self.patch_frames
        if not (0 <= point.x < pixels and 0 <= point.y < pixels and 0 <= point.frame < frames):
            raise InputError(
                f"point {point.x},{point.y} of frame {point.frame} is outside the view: x and y "
                f"must be from 0 to {pixels - 1}, frames from 0 to {frames - 1}"
            )
        position = (point.y // self.patch) * self.side + point.x // self.patch
        return point.frame // self.patch_frames * self.side**2 + position

    def centres(self) -> np.ndarray:
        """The centres (x, y) of the P patches of a frame, in pixels: [P, 2]."""
        rows, columns = np.divmod(np.arange(self.side**2), self.side)
        return (np.stack((columns, rows), axis=1) + 0.5) * self.patch


def attention_path(weights: np.ndarray, grid: TokenGrid) -> np.ndarray:
    """The centre (x, y) of the attention's peak in every frame: weights [F,P] -> [F,2].

    The peak is the part of the weights above the midpoint between their mean and their maximum.
    The centre of all weights would always be near the frame's centre, because softmax gives some
    weight to every token. If all weights of a frame are equal, the result is the frame's centre.
    """
    threshold = (weights.mean(axis=1, keepdims=True) + weights.max(axis=1, keepdims=True)) / 2
    peak = np.clip(weights - threshold, 0, None)
    peak[peak.sum(axis=1) == 0] = 1
    return peak / peak.sum(axis=1, keepdims=True) @ grid.centres()


def moving_points(pixels: np.ndarray, grid: TokenGrid, count: int, frame: int) -> list[QueryPoint]:
    """Centres of the `count` patches of a frame that differ most from the median frame.

    `pixels` are uint8 [T,H,W,3]. Patches next to a chosen patch are used last, so that the points
    are spread over the frame.
    """
    first = frame // grid.patch_frames * grid.patch_frames
    background = np.median(pixels, axis=0)
    change = np.abs(pixels[first : first + grid.patch_frames] - background).mean(axis=(0, 3))
    shape = (grid.side, grid.patch, grid.side, grid.patch)
    change = change.reshape(shape).mean(axis=(1, 3))  # [rows, columns]
    points: list[QueryPoint] = []
    for _ in range(min(count, change.size)):
        row, column = np.unravel_index(change.argmax(), change.shape)
        x, y = (int((index + 0.5) * grid.patch) for index in (column, row))
        points.append(QueryPoint(x, y, frame))
        neighbours = change[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
        neighbours -= 256  # values are at most 255, so neighbours are now chosen last
        change[row, column] = -np.inf
    return points
