"""Rows of the attention of joint and divided layers: what a token takes from every other.

Before its projection such a layer is linear in the values, y_n = sum_m A_nm v_m in each
head. So a row vector times A is the derivative of a sum of one component of y by the same
component of v, as in trajectories.py, for CLS too and however the layer treats it.

Shapes: h heads, N = F*P patches, F frames of tokens, P tokens of a frame, d head size.
Token 0 is CLS.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from slowfast_lara.attention import Estimator
from slowfast_lara.inference.layers import LayerInputs
from slowfast_lara.models.space_time import DividedAttention, SpaceTimeAttention


class GivenLayer(NamedTuple):
    """An attention layer, and the tokens [1,1+N,D] that a model gives it for a view."""

    layer: SpaceTimeAttention
    tokens: Tensor
    num_frames: int


@torch.no_grad()
def given_layers(network: nn.Module, view: Tensor) -> list[list[GivenLayer]]:
    """The attention layers of each block, in the order in which a view [3,T,H,W] passes them."""
    blocks: list[list[GivenLayer]] = []
    hooks = []

    def take(into: list[GivenLayer], layer: nn.Module, args: tuple[Tensor, int]) -> None:
        into.append(GivenLayer(cast(SpaceTimeAttention, layer), *args))

    for block in cast(Any, network).blocks:
        blocks.append([])
        for layer in filter(None, (block.timeattn, block.attn)):
            into = blocks[-1]
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda layer, args, into=into: take(into, layer, args)
                )
            )
    try:
        weight = next(network.parameters())
        network([view[None].to(weight.device, weight.dtype)])
    finally:
        for hook in hooks:
            hook.remove()
    return blocks


def patches_of(given: GivenLayer) -> LayerInputs:
    """What an estimator is given in a layer: the patches, of one group in divided attention."""
    layer, tokens, num_frames = given
    q, k, v = layer.queries_keys_values(tokens)
    if isinstance(layer, DividedAttention):
        q, k, v = (layer.group(x, num_frames)[:1] for x in (q, k, v))
    else:
        q, k, v = (x[:, :, 1:] for x in (q, k, v))
    return LayerInputs(q, k, v, 1, layer.estimator)


def with_estimator(given: GivenLayer, estimator: Estimator) -> GivenLayer:
    if estimator is given.layer.estimator:
        return given
    layer = copy.deepcopy(given.layer)
    layer.estimator = estimator
    return given._replace(layer=layer)


class Mixed(NamedTuple):
    """Rows of weights [h,1+N], and the layer's output before its projection, [1+N,h,d]."""

    rows: Tensor
    output: Tensor


def attention_rows(given: GivenLayer, shares: Tensor) -> Mixed:
    """`shares` [1+N] of the tokens times the attention of each head (see the head of this file)."""
    layer, tokens, num_frames = given
    taken: dict[str, Tensor] = {}

    def open_values(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        taken["qkv"] = output.detach().requires_grad_()
        return taken["qkv"]

    def keep_output(_: nn.Module, args: tuple[Tensor]) -> None:
        taken["output"] = args[0]

    hooks = (
        layer.qkv.register_forward_hook(open_values),
        layer.proj.register_forward_pre_hook(keep_output),
    )
    try:
        with torch.enable_grad():
            layer(tokens, num_frames)
            output = taken["output"][0].unflatten(1, (layer.num_heads, -1))
            component = (shares[:, None] * output[..., 0]).sum()
            (gradient,) = torch.autograd.grad(component, taken["qkv"])
    finally:
        for hook in hooks:
            hook.remove()
    of_values = gradient[0].unflatten(1, (3, layer.num_heads, -1))[:, 2, :, 0]  # [1+N,h]
    return Mixed(of_values.T, output.detach())


def one_token(given: GivenLayer, token: int) -> Tensor:
    """The shares [1+N] of which `token` has all."""
    shares = given.tokens.new_zeros(given.tokens.shape[1])
    shares[token] = 1
    return shares


def cls_rollout(blocks: list[list[GivenLayer]]) -> Tensor:
    """What CLS has taken from every token at the end, [1+N].

    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020: each layer
    mixes tokens by the mean of its heads and, for the residual connection, keeps half.
    """
    layers = [given for block in blocks for given in block]
    shares = one_token(layers[0], 0)
    for given in reversed(layers):
        shares = (shares + attention_rows(given, shares).rows.mean(0)) / 2
    return shares
