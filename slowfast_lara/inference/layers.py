"""Queries, keys and values in the layers of a trained model, and estimators to apply to them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slowfast_lara.attention import ESTIMATORS, Estimator, build_estimator
from slowfast_lara.data import load_views
from slowfast_lara.errors import InputError
from slowfast_lara.models.attention_config import estimator_settings


class LayerInputs(NamedTuple):
    """q, k, v [1,h,F*P,d] of one layer for one view, and the estimator of that layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    num_frames: int
    estimator: Estimator


def middle_view(video: str, cfg: CfgNode) -> Tensor:
    """The middle view among the test views of a video, [3,T,H,W]."""
    views = load_views(video, cfg)
    return views[len(views) // 2]


def check_layer(layer: int, cfg: CfgNode) -> None:
    if not 0 <= layer < cfg.VIT.DEPTH:
        raise InputError(f"--layer is {layer}; must be from 0 to {cfg.VIT.DEPTH - 1}")


@torch.no_grad()
def layer_inputs(
    model: nn.Module, view: Tensor, cfg: CfgNode, layers: Sequence[int]
) -> list[LayerInputs]:
    """Run the model on a view [3,T,H,W] and capture the inputs of the estimators of `layers`.

    Raises InputError if the model's layers are not trajectory attention.
    """
    if cfg.VIT.ATTN_LAYER != "trajectory":
        raise InputError(f"VIT.ATTN_LAYER is {cfg.VIT.ATTN_LAYER!r}; must be 'trajectory'")
    captured: dict[int, LayerInputs] = {}

    def capture(layer: int, estimator: Estimator, args: Any, kwargs: dict[str, int]) -> None:
        q, k, v = (x.float() for x in args)
        captured[layer] = LayerInputs(q, k, v, kwargs["num_frames"], estimator)

    hooks = []
    for layer in layers:
        check_layer(layer, cfg)
        estimator = cast(Any, model).blocks[layer].attn.estimator
        hook = estimator.register_forward_pre_hook(partial(capture, layer), with_kwargs=True)
        hooks.append(hook)
    run_with_hooks(model, view, hooks)
    return [captured[layer] for layer in layers]


def run_with_hooks(model: nn.Module, view: Tensor, hooks: Sequence[RemovableHandle]) -> None:
    """Run the model on a view [3,T,H,W], then remove the given hooks."""
    try:
        weight = next(model.parameters())
        model([view[None].to(weight.device, weight.dtype)])
    finally:
        for hook in hooks:
            hook.remove()


def estimator_for(
    inputs: LayerInputs, name: str, cfg: CfgNode, *, seed: int, **changes: Any
) -> Estimator:
    """Build an estimator for the inputs of a layer; `changes` override the config's options.

    If the new estimator has the same class as the trained estimator of the layer, it gets the
    trained parameters. Their shapes do not depend on the number of landmarks.
    """
    _, heads, tokens, head_dim = inputs.q.shape
    settings = {**estimator_settings(cfg, name), **changes}
    if ESTIMATORS[name].landmarks_are_tokens:
        # This estimator has at most one landmark per token, but the config may set more landmarks.
        settings["num_landmarks"] = min(settings["num_landmarks"], tokens)
    built = build_estimator(name, head_dim=head_dim, num_heads=heads, seed=seed, **settings)
    if type(built) is type(inputs.estimator):
        built.load_state_dict(dict(inputs.estimator.named_parameters()), strict=False)
    return built.to(inputs.q.device).eval()
