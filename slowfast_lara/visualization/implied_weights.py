"""Attention weights that an estimator implies, computed by differentiation.

Every estimator is linear in the values. (An estimator that groups keys is linear for fixed groups.)
In each head, out_n = sum_m w_nm v_m, where n is a query and m a key. So the weights w_nm of query n
are the derivative of one component of out_n with respect to the same component of v_m. The weights
are exact and cost one forward and backward pass of the layer. The N x N matrix of weights is not
built, unless the estimator itself builds it.

For trajectory layers, `trajectory_weights` differentiates the estimator. For joint and divided
layers, `attention_rows` differentiates the whole layer, including CLS.

Shapes: h heads, N = F*P patch tokens, F temporal tokens, P patches of a frame, d head size,
D = h*d. The first R tokens of a layer are CLS and registers.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from slowfast_lara.attention import Estimator
from slowfast_lara.inference.layers import LayerInputs, run_with_hooks
from slowfast_lara.models.space_time import DividedAttention, SpaceTimeAttention


class ImpliedWeights(NamedTuple):
    """Weights of one query, [h,F,P] or (with CLS) [h,R+N], and the outputs of all queries."""

    weights: Tensor
    output: Tensor


def trajectory_weights(estimator: Estimator, inputs: LayerInputs, token: int) -> ImpliedWeights:
    """Compute the weights [h,F,P] of the query `token` over the patches of each frame."""
    v = inputs.v.detach().requires_grad_()
    with torch.enable_grad():
        output = estimator(inputs.q, inputs.k, v, num_frames=inputs.num_frames)
        (gradient,) = torch.autograd.grad(output[:, :, token, :, 0].sum(), v)
    weights = gradient[0, :, :, 0].unflatten(1, (inputs.num_frames, -1))
    return ImpliedWeights(weights, output.detach())


class LayerCall(NamedTuple):
    """A joint or divided attention layer, and its input tokens [1,R+N,D] for a view."""

    layer: SpaceTimeAttention
    tokens: Tensor
    num_frames: int


@torch.no_grad()
def capture_layers(network: nn.Module, view: Tensor) -> list[list[LayerCall]]:
    """Run the network on a view [3,T,H,W]; record the input of each attention layer, by block."""
    blocks: list[list[LayerCall]] = []
    hooks = []

    def capture(calls: list[LayerCall], layer: nn.Module, args: tuple[Tensor, int]) -> None:
        calls.append(LayerCall(cast(SpaceTimeAttention, layer), *args))

    for block in cast(Any, network).blocks:
        calls: list[LayerCall] = []
        blocks.append(calls)
        for layer in filter(None, (block.timeattn, block.attn)):
            hooks.append(layer.register_forward_pre_hook(partial(capture, calls)))
    run_with_hooks(network, view, hooks)
    return blocks


def patch_inputs(call: LayerCall) -> LayerInputs:
    """q, k, v of the patches; in divided attention, of the first frame or spatial position only."""
    layer, tokens, num_frames = call
    q, k, v = layer.queries_keys_values(tokens)
    if isinstance(layer, DividedAttention):
        q, k, v = (layer.group(x, num_frames)[:1] for x in (q, k, v))
    else:
        q, k, v = (layer.split(x)[1] for x in (q, k, v))
    return LayerInputs(q, k, v, 1, layer.estimator)


def attention_rows(
    call: LayerCall, query_weights: Tensor, estimator: Estimator | None = None
) -> ImpliedWeights:
    """Multiply the row vector `query_weights` [R+N] by the attention matrix of each head.

    Returns the products [h,R+N], and the layer's output before the output projection, [R+N,h,d]. If
    `estimator` is given, it replaces the estimator of the layer.
    """
    qkv = call.layer.qkv(call.tokens).detach().requires_grad_()
    layer = cast(Any, copy.deepcopy(call.layer))
    layer.qkv = layer.proj = nn.Identity()
    layer.estimator = estimator or layer.estimator
    with torch.enable_grad():
        output = layer(qkv, call.num_frames)[0].unflatten(1, (layer.num_heads, -1))
        component = (query_weights[:, None] * output[..., 0]).sum()
        (gradient,) = torch.autograd.grad(component, qkv)
    value_gradient = gradient[0].unflatten(1, (3, layer.num_heads, -1))[:, 2, :, 0]  # [R+N,h]
    return ImpliedWeights(value_gradient.T, output.detach())


def one_hot(call: LayerCall, token: int) -> Tensor:
    """A one-hot vector [R+N] that selects one query."""
    selected = call.tokens.new_zeros(call.tokens.shape[1])
    selected[token] = 1
    return selected


def cls_rollout(blocks: list[list[LayerCall]]) -> Tensor:
    """Attention rollout of CLS over all layers, [R+N].

    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020: the product
    of (A + I) / 2 over all layers, where A is the layer's attention matrix, averaged over heads,
    and the identity I stands for the residual connection.
    """
    layers = [call for block in blocks for call in block]
    weights = one_hot(layers[0], 0)
    for call in reversed(layers):
        weights = (weights + attention_rows(call, weights).weights.mean(0)) / 2
    return weights
