"""Operators `temporal` and `temporal_backward`: attention over the frames of each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import (
    block_size,
    cdiv,
    launch,
    matmul_precision,
    tile_for,
    with_unit_stride,
)
from slowfast_lara.attention.kernels.tiles import weight_gradient_parts

# Frames in one tile of scores; with more frames PyTorch computes the softmax.
MAX_TILE_FRAMES = 32


@torch.library.custom_op("slowfast_lara::temporal", mutates_args=())
def temporal(
    q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool
) -> tuple[Tensor, Tensor]:
    """`models.temporal.temporal_attention`, and its attention weights [B,N,h,F] in float32."""
    q, x, weight = q.contiguous(), _with_32_bit_offsets(x), weight.contiguous()
    (_, _, h, d), F = q.shape, x.shape[1]
    w_k, w_v = weight.unflatten(0, (2, h, d))
    scale = d**-0.5
    if F <= MAX_TILE_FRAMES:
        attention = _scores(q, x, w_k, True, "softmax", scale=scale)
    else:
        attention = (_scores(q, x, w_k, True, "") * scale).softmax(-1)
    bias_v = None if bias is None else bias.contiguous()[h * d :]
    if project_values:
        return _pool(attention, x, w_v, bias_v), attention
    return _sum(attention, x), attention


def _with_32_bit_offsets(x: Tensor) -> Tensor:
    """x [B,F,N,D], copied if its last dimension has a stride or a clip spans 2**31 elements."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:]))
    return with_unit_stride(x) if last < 2**31 else x.contiguous()


def _pool(over_frames: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W_h (sum_f a_nhf x_nf) + bias, [B,N,h,d]."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_pool

    (B, N, h, F), d = over_frames.shape, weight.shape[1]
    out = x.new_empty(B, N, h, d)
    sizes = tile_for("temporal_pool", x)
    launch(
        temporal_pool,
        B * cdiv(N, sizes["BLOCK_N"]) * cdiv(h, sizes["BLOCK_H"]) * cdiv(d, sizes["BLOCK_E"]),
        x,
        *(over_frames, x, weight, weight if bias is None else bias, out),
        *(*x.stride()[:3], N, F, h, d),
        BIAS=bias is not None,
        PRECISION=matmul_precision(),
        **sizes,
    )
    return out


def _sum(attention: Tensor, x: Tensor) -> Tensor:
    """sum_f a_nhf x_nf for the columns of each head, [B,N,h,d]."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_sum

    (B, N, h, F), D = attention.shape, x.shape[3]
    out = x.new_empty(B, N, h, D // h)
    sizes = tile_for("temporal_sum", x)
    programs = B * cdiv(N, sizes["BLOCK_N"]) * cdiv(D, sizes["BLOCK_X"])
    numbers = (*x.stride()[:3], N, F, h, D // h)
    launch(temporal_sum, programs, x, attention, x, out, *numbers, **sizes)
    return out


def _scores(
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    project: bool,
    epilogue: str,
    attention: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """q_nh.(W_h x_nf), [B,N,h,F] float32, with an epilogue of the kernel."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_scores

    (B, N, h, d), F = q.shape, x.shape[1]
    out = q.new_empty(B, N, h, F, dtype=torch.float32)
    sizes = tile_for("temporal_scores", q)
    sizes["BLOCK_F"] = min(block_size(F), MAX_TILE_FRAMES)
    launch(
        temporal_scores,
        B * cdiv(N, sizes["BLOCK_N"]) * cdiv(F, sizes["BLOCK_F"]) * cdiv(h, sizes["BLOCK_H"]),
        q,
        *(q, x, weight, out if attention is None else attention, out),
        *(*x.stride()[:3], scale, N, F, h, d),
        PROJECT=project,
        EPILOGUE=epilogue,
        PRECISION=matmul_precision(),
        **sizes,
    )
    return out


@temporal.register_fake
def _(q: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(*q.shape[:3], x.shape[1], dtype=torch.float32)


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
    """Gradients of q, x, weight and bias (empty without a bias)."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_backward_tokens

    q, x, weight, grad = (
        q.contiguous(),
        _with_32_bit_offsets(x),
        weight.contiguous(),
        grad.contiguous(),
    )
    (B, N, h, d), F = q.shape, x.shape[1]
    w_k, w_v = weight.unflatten(0, (2, h, d))
    scale = d**-0.5
    if F <= MAX_TILE_FRAMES:
        grad_scores = _scores(grad, x, w_v, project_values, "gradient", attention, scale)
    else:
        grad_attention = _scores(grad, x, w_v, project_values, "")
        mean = (attention * grad_attention).sum(-1, keepdim=True)
        grad_scores = scale * attention * (grad_attention - mean)
    grad_x = x.new_empty(x.shape)
    sizes = tile_for("temporal_backward_tokens", q)
    columns = cdiv(h * d, sizes["BLOCK_X"]) * cdiv(F, sizes["BLOCK_F"])
    launch(
        temporal_backward_tokens,
        B * cdiv(N, sizes["BLOCK_N"]) * columns,
        q,
        *(q, grad, w_k, w_v, attention, grad_scores, grad_x, N, F, h, d),
        PROJECT=project_values,
        PRECISION=matmul_precision(),
        **sizes,
    )
    grad_q = _pool(grad_scores, x, w_k)
    grad_weight = torch.zeros_like(weight)
    grad_weight[: h * d] = _weight_gradient(q, x, grad_scores)
    if project_values:
        grad_weight[h * d :] = _weight_gradient(grad, x, attention)
    return grad_q, grad_x, grad_weight, _bias_gradient(grad, bias, project_values)


def _weight_gradient(q: Tensor, x: Tensor, over_frames: Tensor) -> Tensor:
    """sum_n q_nh (sum_f c_nhf x_nf)^T, [D,D] float32, from partial sums over the tokens."""
    from slowfast_lara.attention.kernels.triton_temporal import temporal_backward_weight

    (B, N, h, d), F = q.shape, x.shape[1]
    sizes = tile_for("temporal_backward_weight", q)
    blocks = B * cdiv(N, sizes["BLOCK_N"])
    steps = cdiv(blocks, weight_gradient_parts(B * N))
    tiles = cdiv(h, sizes["BLOCK_H"]) * cdiv(d, sizes["BLOCK_E"]) * cdiv(h * d, sizes["BLOCK_X"])
    out = q.new_empty(cdiv(blocks, steps), h * d, h * d, dtype=torch.float32)
    launch(
        temporal_backward_weight,
        out.shape[0] * tiles,
        q,
        *(q, x, over_frames, out, *x.stride()[:3], B, N, F, h, d, steps),
        PRECISION=matmul_precision(),
        **sizes,
    )
    return out.sum(0)


def _bias_gradient(grad: Tensor, bias: Tensor | None, project_values: bool) -> Tensor:
    """Zero for the keys, whose bias cancels in the softmax over the frames."""
    if bias is None:
        return grad.new_empty(0)
    out = torch.zeros_like(bias)
    if project_values:
        out[out.shape[0] // 2 :] = grad.sum((0, 1)).flatten()
    return out


@temporal_backward.register_fake
def _(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    grads = (given.new_empty(given.shape) for given in (q, x, weight))
    return (*grads, q.new_empty(0) if bias is None else torch.empty_like(bias))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.project_values = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, x, weight, bias, attention = ctx.saved_tensors
    grad_q, grad_x, grad_weight, grad_bias = torch.ops.slowfast_lara.temporal_backward(
        q, x, weight, bias, ctx.project_values, attention, grad
    )
    return grad_q, grad_x, grad_weight, None if bias is None else grad_bias, None


temporal.register_autograd(_backward, setup_context=_save)
