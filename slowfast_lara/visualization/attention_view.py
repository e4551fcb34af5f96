"""Attention weights of several estimators, on the inputs of one layer of a trained model.

The symbols in tensor shapes are defined in implied_weights.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from slowfast_lara.attention import ESTIMATORS, Estimator
from slowfast_lara.config import get_cfg
from slowfast_lara.config.load import with_overrides
from slowfast_lara.data.transforms import pixels_of
from slowfast_lara.inference.layers import check_layer, estimator_for, layer_inputs, middle_view
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import (
    EXACT,
    RECOMMENDED,
    chosen_estimator,
    display_name,
    resolve_attention,
)
from slowfast_lara.visualization.heat_maps import AttentionMap
from slowfast_lara.visualization.implied_weights import (
    ImpliedWeights,
    attention_rows,
    capture_layers,
    cls_rollout,
    one_hot,
    patch_inputs,
    trajectory_weights,
)
from slowfast_lara.visualization.token_grid import QueryPoint, TokenGrid, attention_path


def default_attentions(cfg: CfgNode) -> list[str]:
    """The names of all estimators, exact attention first.

    For a model with exact attention, LARA appears twice: with the config's options (by default
    the paper's) and with the recommended options.
    """
    names = [EXACT, *(name for name in ESTIMATORS if name != EXACT)]
    if chosen_estimator(cfg) == EXACT:
        for recommended, (name, _) in RECOMMENDED.items():
            names.insert(names.index(name) + 1, recommended)
    return names


def _label(name: str, cfg: CfgNode) -> str:
    """The caption of an attention in figures and tables."""
    if name in RECOMMENDED:
        return f"{RECOMMENDED[name][0]} (recommended)"
    node, has_recommended = name.upper(), name in dict(RECOMMENDED.values())
    if has_recommended and name != chosen_estimator(cfg) and cfg.VIT[node] == get_cfg().VIT[node]:
        return f"{name} (paper)"  # the default options are the paper's
    return display_name(name)


class AttentionView:
    """Middle view of a video (centre crop), and the inputs of one attention layer for this view.

    Attributes:
        pixels: the view, uint8 [T,H,W,3].
        grid: the geometry of the view's tokens.
        total: what 100 % means in captions: "all attention", or "the frame's attention".
    """

    def __init__(self, model: TrainedModel, video: str, layer: int | None = None) -> None:
        self.cfg = with_overrides(model.cfg, ["TEST.NUM_SPATIAL_CROPS", 1])
        self.layer = self.cfg.VIT.DEPTH - 1 if layer is None else layer
        check_layer(self.layer, self.cfg)
        view = middle_view(video, self.cfg)
        self.pixels, self.grid = pixels_of(view, self.cfg), TokenGrid.from_config(self.cfg)
        self.has_trajectories = self.cfg.VIT.ATTN_LAYER == "trajectory"
        self.total = "the frame's attention" if self.has_trajectories else "all attention"
        if self.has_trajectories:
            (self._inputs,) = layer_inputs(model.network, view, self.cfg, [self.layer])
        else:
            self.blocks = capture_layers(model.network, view)
            self._inputs = patch_inputs(self.blocks[self.layer][-1])

    @torch.no_grad()
    def attention_maps(
        self, point: QueryPoint, names: Sequence[str], head: int | None = None
    ) -> list[AttentionMap]:
        """Attention maps of a query point, one per estimator in `names`.

        If `head` is None, the maps are averaged over heads. The errors are mean squared differences
        from the first estimator, which should be exact attention.
        """
        maps: list[AttentionMap] = []
        token, reference = self.grid.token(point), None
        for name in names:
            estimator = self._estimator(name)
            if self.has_trajectories:
                implied = trajectory_weights(estimator, self._inputs, token)
                shown = _select_head(implied.weights, head)
            else:
                implied, shown = self._row(estimator, token, head)
            reference = reference or implied
            errors = [(x - y).square().mean().item() for x, y in zip(implied, reference)]
            weights = shown.cpu().numpy()
            path = attention_path(weights, self.grid)
            maps.append(AttentionMap(name, _label(name, self.cfg), weights, path, *errors))
        return maps

    def _estimator(self, name: str) -> Estimator:
        """The model's trained estimator if it has this name, else a new estimator."""
        if name == chosen_estimator(self.cfg):
            return self._inputs.estimator
        estimator, options = resolve_attention(name)
        seed = self.cfg.RNG_SEED + self.layer  # the seed of this layer in the model
        return estimator_for(self._inputs, estimator, self.cfg, seed=seed, **options)

    def _row(
        self, estimator: Estimator, token: int, head: int | None
    ) -> tuple[ImpliedWeights, Tensor]:
        """The query's weights [h,F,P] with the layer's output, and the weights [F,P] to show."""
        *temporal, call = self.blocks[self.layer]
        rows, output = attention_rows(call, one_hot(call, call.layer.num_prefix + token), estimator)
        shown = _select_head(rows, head)
        for earlier in temporal:  # divided attention: multiply by the weights over time
            shown = attention_rows(earlier, shown).weights.mean(0)
        return ImpliedWeights(self._by_frame(rows), output), self._by_frame(shown)

    @torch.no_grad()
    def cls_map(self) -> AttentionMap:
        """Attention rollout of CLS over all layers of a joint or divided model."""
        weights = self._by_frame(cls_rollout(self.blocks)).cpu().numpy()
        return AttentionMap("CLS", "CLS", weights)

    def _by_frame(self, rows: Tensor) -> Tensor:
        """[...,R+N] -> [...,F,P], without CLS and registers."""
        num_prefix = self.blocks[0][0].layer.num_prefix
        return rows[..., num_prefix:].unflatten(-1, (self.grid.num_frames, -1))


def _select_head(weights: Tensor, head: int | None) -> Tensor:
    return weights.mean(0) if head is None else weights[head]
