"""What an attention layer of a model is given for a video, and other estimators for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from slowfast_lara.attention import ESTIMATORS, Estimator, build_estimator
from slowfast_lara.data import load_views
from slowfast_lara.errors import InputError
from slowfast_lara.models.attention_config import estimator_settings


class LayerInputs(NamedTuple):
    """q, k, v [1,h,F*P,d] of a layer for one view, and the layer's estimator."""

    q: Tensor
    k: Tensor
    v: Tensor
    num_frames: int
    estimator: Estimator


def middle_view(video: str, cfg: CfgNode) -> Tensor:
    """The middle one of a video's test views, [3,T,H,W]."""
    views = load_views(video, cfg)
    return views[len(views) // 2]


@torch.no_grad()
def layer_inputs(
    model: nn.Module, view: Tensor, cfg: CfgNode, layers: Sequence[int]
) -> list[LayerInputs]:
    """What the estimators of some layers are given for a view [3,T,H,W]."""
    if cfg.VIT.ATTN_LAYER != "trajectory":
        raise InputError(f"the model has {cfg.VIT.ATTN_LAYER} attention; trajectory is expected")
    taken: dict[int, LayerInputs] = {}

    def take(layer: int, estimator: Estimator, args: Any, kwargs: dict[str, int]) -> None:
        q, k, v = (x.float() for x in args)
        taken[layer] = LayerInputs(q, k, v, kwargs["num_frames"], estimator)

    hooks = []
    for layer in layers:
        if not 0 <= layer < cfg.VIT.DEPTH:
            raise InputError(f"--layer is {layer}; the model has layers 0 to {cfg.VIT.DEPTH - 1}")
        estimator = cast(Any, model).blocks[layer].attn.estimator
        hook = estimator.register_forward_pre_hook(partial(take, layer), with_kwargs=True)
        hooks.append(hook)
    try:
        weight = next(model.parameters())
        model([view[None].to(weight.device, weight.dtype)])
    finally:
        for hook in hooks:
            hook.remove()
    return [taken[layer] for layer in layers]


def estimator_for(
    inputs: LayerInputs, name: str, cfg: CfgNode, *, seed: int, **changes: Any
) -> Estimator:
    """An estimator of a config's options, but for `changes`, in a layer's place.

    From the layer's own estimator, if it is of the same kind, it has the learned
    parameters: their shape does not depend on the number of landmarks.
    """
    _, heads, tokens, head_dim = inputs.q.shape
    settings = {**estimator_settings(cfg, name), **changes}
    if ESTIMATORS[name].landmarks_are_tokens:  # the config of another estimator may have more
        settings["num_landmarks"] = min(settings["num_landmarks"], tokens)
    built = build_estimator(name, head_dim=head_dim, num_heads=heads, seed=seed, **settings)
    if type(built) is type(inputs.estimator):
        built.load_state_dict(dict(inputs.estimator.named_parameters()), strict=False)
    return built.to(inputs.q.device).eval()
