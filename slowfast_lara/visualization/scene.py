"""A video as a model sees it, and where the attention of its points goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention import Estimator
from slowfast_lara.config.load import with_overrides
from slowfast_lara.data.transforms import pixels_of
from slowfast_lara.errors import InputError
from slowfast_lara.inference.layers import layer_inputs, middle_view
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.visualization.attention_rows import (
    attention_rows,
    cls_rollout,
    given_layers,
    one_token,
    patches_of,
    with_estimator,
)
from slowfast_lara.visualization.heat_maps import Picture
from slowfast_lara.visualization.trajectories import (
    Grid,
    Point,
    attention_of,
    estimators_of,
    path_of,
)


class _Seen(NamedTuple):
    """Weights of a point in every head [h,F,P], what is shown of them [F,P], and all outputs."""

    weights: Tensor
    shown: Tensor
    output: Tensor


class Scene:
    """The middle view of a video, of the centre, in a layer of a model.

    `pixels` uint8 [T,H,W,3] are the view's; `grid` is how they are cut into tokens.
    """

    def __init__(self, model: TrainedModel, video: str, layer: int | None = None) -> None:
        self._cfg = with_overrides(model.cfg, ["TEST.NUM_SPATIAL_CROPS", 1])
        depth = self._cfg.VIT.DEPTH
        self.layer = depth - 1 if layer is None else layer
        if not 0 <= self.layer < depth:
            raise InputError(f"--layer is {layer}; the model has layers 0 to {depth - 1}")
        view = middle_view(video, self._cfg)
        self.pixels, self.grid = pixels_of(view, self._cfg), Grid.of(self._cfg)
        self.has_trajectories = self._cfg.VIT.ATTN_LAYER == "trajectory"
        self.shares_of = "the frame's attention" if self.has_trajectories else "all attention"
        if self.has_trajectories:
            (self._inputs,) = layer_inputs(model.network, view, self._cfg, [self.layer])
        else:
            self._blocks = given_layers(model.network, view)
            self._inputs = patches_of(self._blocks[self.layer][-1])

    @torch.no_grad()
    def look(self, point: Point, names: Sequence[str], head: int | None = None) -> list[Picture]:
        """What each attention makes of a point, in one head or in the mean of all.

        The first one's, which is to be the exact one, is what the errors are to.
        """
        pictures: list[Picture] = []
        token, first = self.grid.token(point), None
        see = self._see_trajectory if self.has_trajectories else self._see_row
        for name, estimator in estimators_of(names, self._inputs, self._cfg, self.layer).items():
            seen = see(estimator, token, head)
            first = first or seen
            weight_error = (seen.weights - first.weights).square().mean().item()
            output_error = (seen.output - first.output).square().mean().item()
            weights = seen.shown.cpu().numpy()
            path = path_of(weights, self.grid)
            pictures.append(Picture(name, weights, path, weight_error, output_error))
        return pictures

    def _see_trajectory(self, estimator: Estimator, token: int, head: int | None) -> _Seen:
        seen = attention_of(estimator, self._inputs, token)
        return _Seen(seen.weights, _of_head(seen.weights, head), seen.output)

    def _see_row(self, estimator: Estimator, token: int, head: int | None) -> _Seen:
        *over_time, given = self._blocks[self.layer]
        mixed = attention_rows(with_estimator(given, estimator), one_token(given, 1 + token))
        shares = _of_head(mixed.rows, head)
        for before in over_time:  # what the tokens of its frame are made of
            shares = attention_rows(before, shares).rows.mean(0)
        return _Seen(self._frames(mixed.rows), self._frames(shares), mixed.output)

    @torch.no_grad()
    def cls(self) -> Picture:
        """What CLS has taken from each patch through all layers; of joint and divided models."""
        weights = self._frames(cls_rollout(self._blocks)).cpu().numpy()
        return Picture("CLS", weights)

    def _frames(self, shares: Tensor) -> Tensor:
        """[...,1+N] -> [...,F,P], without CLS."""
        return shares[..., 1:].unflatten(-1, (self.grid.num_frames, -1))


def _of_head(weights: Tensor, head: int | None) -> Tensor:
    return weights.mean(0) if head is None else weights[head]
