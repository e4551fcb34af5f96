"""Where a point's attention goes, frame by frame: its weights over each frame's tokens.

Every estimator is linear in the values: out_nf = sum_p w_nfp v_fp. So the weights
of query n are the derivative of one component of out_n by the same component of
v. One forward and one backward pass give them for all frames and heads, exactly
and for any estimator, at the cost of a training step of the layer: the N x N
matrix never exists, where the estimator itself does not make it.

Shapes: h heads, N = F*P tokens, F frames of tokens, P tokens of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from slowfast_lara.attention import Estimator
from slowfast_lara.errors import InputError
from slowfast_lara.inference.layers import LayerInputs, estimator_for
from slowfast_lara.models.attention_config import chosen_estimator


class Point(NamedTuple):
    """A place in a view: pixels (x to the right, y down), and the number of its frame."""

    x: int
    y: int
    frame: int


@dataclass(frozen=True)
class Grid:
    """How a view is cut into tokens: frame-major, then rows, then columns."""

    num_frames: int
    side: int
    patch: int
    patch_frames: int

    @classmethod
    def of(cls, cfg: CfgNode) -> Grid:
        vit = cfg.VIT
        side = cfg.DATA.TEST_CROP_SIZE // vit.PATCH_SIZE
        return cls(vit.TEMPORAL_RESOLUTION, side, vit.PATCH_SIZE, vit.PATCH_SIZE_TEMP)

    def token(self, point: Point) -> int:
        pixels, frames = self.side * self.patch, self.num_frames * self.patch_frames
        if not (0 <= point.x < pixels and 0 <= point.y < pixels and 0 <= point.frame < frames):
            raise InputError(
                f"point {point.x},{point.y} of frame {point.frame}; the view has x "
                f"and y from 0 to {pixels - 1} and frames from 0 to {frames - 1}"
            )
        place = (point.y // self.patch) * self.side + point.x // self.patch
        return point.frame // self.patch_frames * self.side**2 + place

    def centres(self) -> np.ndarray:
        """(x, y) of the middles of a frame's tokens, in pixels: [P, 2]."""
        rows, columns = np.divmod(np.arange(self.side**2), self.side)
        return (np.stack((columns, rows), axis=1) + 0.5) * self.patch


def estimators_of(
    names: Sequence[str], inputs: LayerInputs, cfg: CfgNode, layer: int
) -> dict[str, Estimator]:
    """Estimators by name, with the config's settings; the model's own is itself."""
    seed, own = cfg.RNG_SEED + layer, chosen_estimator(cfg)  # the seed of the model's layer
    return {
        name: inputs.estimator if name == own else estimator_for(inputs, name, cfg, seed=seed)
        for name in names
    }


class Seen(NamedTuple):
    """An estimator's weights for one query [h,F,P], and its output for all [1,h,N,F,d]."""

    weights: Tensor
    output: Tensor


def attention_of(estimator: Estimator, inputs: LayerInputs, token: int) -> Seen:
    """The implied weights of a query, by the derivative (see the head of this file)."""
    v = inputs.v.detach().requires_grad_()
    with torch.enable_grad():
        output = estimator(inputs.q, inputs.k, v, num_frames=inputs.num_frames)
        (gradient,) = torch.autograd.grad(output[:, :, token, :, 0].sum(), v)
    weights = gradient[0, :, :, 0].unflatten(1, (inputs.num_frames, -1))
    return Seen(weights, output.detach())


def path_of(weights: np.ndarray, grid: Grid) -> np.ndarray:
    """The centre (x, y) of the attention in every frame: weights [F,P] -> [F,2].

    The mean place of the peak: of what rises above the middle between an equal share
    and the largest weight. Softmax gives every token something, and all of that
    together would pull each centre to the middle of the frame. Where all tokens get
    the same, the centre is that middle.
    """
    foot = (weights.mean(axis=1, keepdims=True) + weights.max(axis=1, keepdims=True)) / 2
    peak = np.clip(weights - foot, 0, None)
    peak[peak.sum(axis=1) == 0] = 1
    return peak / peak.sum(axis=1, keepdims=True) @ grid.centres()


def moving_points(pixels: np.ndarray, grid: Grid, count: int, frame: int) -> list[Point]:
    """The places of a frame that differ most from what is there most of the time.

    pixels uint8 [T,H,W,3]. Points are middles of tokens, no two of them neighbours
    while there are others.
    """
    first = frame // grid.patch_frames * grid.patch_frames
    usual = np.median(pixels, axis=0)
    change = np.abs(pixels[first : first + grid.patch_frames] - usual).mean(axis=(0, 3))
    shape = (grid.side, grid.patch, grid.side, grid.patch)
    change = change.reshape(shape).mean(axis=(1, 3))  # [rows, columns]
    points: list[Point] = []
    for _ in range(min(count, change.size)):
        row, column = np.unravel_index(change.argmax(), change.shape)
        points.append(Point(int((column + 0.5) * grid.patch), int((row + 0.5) * grid.patch), frame))
        around = change[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
        around -= 256  # below any that is left, above those taken twice
        change[row, column] = -np.inf
    return points
