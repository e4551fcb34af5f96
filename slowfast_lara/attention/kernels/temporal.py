"""The operators `temporal` and `temporal_backward`: attention over the frames of each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import (
    cdiv,
    power_of_two,
    precision,
    rows_in_place,
    run,
    tile_for,
)
from slowfast_lara.attention.kernels.tiles import temporal_weight_parts

# So many frames are in one tile of scores; of more, the softmax is taken by PyTorch.
MOST_FRAMES_OF_A_TILE = 32


@torch.library.custom_op("slowfast_lara::temporal", mutates_args=())
def temporal(
    q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool
) -> tuple[Tensor, Tensor]:
    """models.temporal.temporal_attention, and its attention [B,N,h,F] in float32."""
    q, x, weight = q.contiguous(), _in_32_bits(x), weight.contiguous()
    (_, _, h, d), F = q.shape, x.shape[1]
    w_k, w_v = weight.unflatten(0, (2, h, d))
    scale = d**-0.5
    if F <= MOST_FRAMES_OF_A_TILE:
        attention = _scores(q, x, w_k, True, "softmax", scale=scale)
    else:
        attention = (_scores(q, x, w_k, True, "") * scale).softmax(-1)
    bias_v = None if bias is None else bias.contiguous()[h * d :]
    if project_values:
        return _pool(attention, x, w_v, bias_v), attention
    return _sum(attention, x), attention


def _in_32_bits(x: Tensor) -> Tensor:
    """x [B,F,N,D] with rows in place, and a clip's numbers at places that 32 bits can count."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:]))
    return rows_in_place(x) if last < 2**31 else x.contiguous()


def _pool(over_frames: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W_h (sum_f a_nhf x_nf) and the bias, [B,N,h,d]."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_pool

    (B, N, h, F), d = over_frames.shape, weight.shape[1]
    out = x.new_empty(B, N, h, d)
    sizes = tile_for("temporal_pool", x)
    run(
        temporal_pool,
        B * cdiv(N, sizes["BLOCK_N"]) * cdiv(h, sizes["BLOCK_H"]) * cdiv(d, sizes["BLOCK_E"]),
        x,
        *(over_frames, x, weight, weight if bias is None else bias, out),
        *(*x.stride()[:3], N, F, h, d),
        BIAS=bias is not None,
        PRECISION=precision(),
        **sizes,
    )
    return out


def _sum(attention: Tensor, x: Tensor) -> Tensor:
    """sum_f a_nhf x_nf of the head's own columns, [B,N,h,d]."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_sum

    (B, N, h, F), D = attention.shape, x.shape[3]
    out = x.new_empty(B, N, h, D // h)
    sizes = tile_for("temporal_sum", x)
    programs = B * cdiv(N, sizes["BLOCK_N"]) * cdiv(D, sizes["BLOCK_X"])
    numbers = (*x.stride()[:3], N, F, h, D // h)
    run(temporal_sum, programs, x, attention, x, out, *numbers, **sizes)
    return out


def _scores(
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    project: bool,
    then: str,
    attention: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """q_nh.(W_h x_nf), [B,N,h,F] float32, and `then` what triton_temporal.py says."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_scores

    (B, N, h, d), F = q.shape, x.shape[1]
    out = q.new_empty(B, N, h, F, dtype=torch.float32)
    sizes = tile_for("temporal_scores", q)
    sizes["BLOCK_F"] = min(power_of_two(F), MOST_FRAMES_OF_A_TILE)
    run(
        temporal_scores,
        B * cdiv(N, sizes["BLOCK_N"]) * cdiv(F, sizes["BLOCK_F"]) * cdiv(h, sizes["BLOCK_H"]),
        q,
        *(q, x, weight, out if attention is None else attention, out),
        *(*x.stride()[:3], scale, N, F, h, d),
        PROJECT=project,
        THEN=then,
        PRECISION=precision(),
        **sizes,
    )
    return out


@temporal.register_fake
def _(q: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(*q.shape[:3], x.shape[1], dtype=torch.float32)


@torch.library.custom_op("slowfast_lara::temporal_backward", mutates_args=())
def temporal_backward(
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    project_values: bool,
    attention: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, x, weight and bias (empty without one)."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_spread

    q, x, weight, grad = q.contiguous(), _in_32_bits(x), weight.contiguous(), grad.contiguous()
    (B, N, h, d), F = q.shape, x.shape[1]
    w_k, w_v = weight.unflatten(0, (2, h, d))
    scale = d**-0.5
    if F <= MOST_FRAMES_OF_A_TILE:
        grad_scores = _scores(grad, x, w_v, project_values, "gradient", attention, scale)
    else:
        grad_attention = _scores(grad, x, w_v, project_values, "")
        mean = (attention * grad_attention).sum(-1, keepdim=True)
        grad_scores = scale * attention * (grad_attention - mean)
    grad_x = x.new_empty(x.shape)
    sizes = tile_for("temporal_spread", q)
    columns = cdiv(h * d, sizes["BLOCK_X"]) * cdiv(F, sizes["BLOCK_F"])
    run(
        temporal_spread,
        B * cdiv(N, sizes["BLOCK_N"]) * columns,
        q,
        *(q, grad, w_k, w_v, attention, grad_scores, grad_x, N, F, h, d),
        PROJECT=project_values,
        PRECISION=precision(),
        **sizes,
    )
    grad_q = _pool(grad_scores, x, w_k)
    grad_weight = torch.zeros_like(weight)
    grad_weight[: h * d] = _weight_gradient(q, x, grad_scores)
    if project_values:
        grad_weight[h * d :] = _weight_gradient(grad, x, attention)
    return grad_q, grad_x, grad_weight, _bias_gradient(grad, bias, project_values)


def _weight_gradient(q: Tensor, x: Tensor, over_frames: Tensor) -> Tensor:
    """sum_n q_nh (sum_f c_nhf x_nf)^T, [D,D] float32, by parts of the tokens."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_weight

    (B, N, h, d), F = q.shape, x.shape[1]
    sizes = tile_for("temporal_weight", q)
    blocks = B * cdiv(N, sizes["BLOCK_N"])
    steps = cdiv(blocks, temporal_weight_parts(B * N))
    tiles_of_weight = cdiv(h, sizes["BLOCK_H"]) * cdiv(d, sizes["BLOCK_E"])
    tiles_of_weight *= cdiv(h * d, sizes["BLOCK_X"])
    out = q.new_empty(cdiv(blocks, steps), h * d, h * d, dtype=torch.float32)
    run(
        temporal_weight,
        out.shape[0] * tiles_of_weight,
        q,
        *(q, x, over_frames, out, *x.stride()[:3], B, N, F, h, d, steps),
        PRECISION=precision(),
        **sizes,
    )
    return out.sum(0)


def _bias_gradient(grad: Tensor, bias: Tensor | None, project_values: bool) -> Tensor:
    """That of the keys is zero: it adds the same to every frame."""
    if bias is None:
        return grad.new_empty(0)
    out = torch.zeros_like(bias)
    if project_values:
        out[out.shape[0] // 2 :] = grad.sum((0, 1)).flatten()
    return out


@temporal_backward.register_fake
def _(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    like = [
        torch.empty_like(given, memory_format=torch.contiguous_format) for given in (q, x, weight)
    ]
    return (*like, q.new_empty(0) if bias is None else torch.empty_like(bias))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.project_values = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, x, weight, bias, attention = ctx.saved_tensors
    grad_q, grad_x, grad_weight, grad_bias = torch.ops.slowfast_lara.temporal_backward(
        q, x, weight, bias, ctx.project_values, attention, grad
    )
    return grad_q, grad_x, grad_weight, None if bias is None else grad_bias, None


temporal.register_autograd(_backward, setup_context=_keep)
