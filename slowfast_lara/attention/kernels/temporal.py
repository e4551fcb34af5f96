"""Operators `temporal` and `temporal_backward`: attention over the frames of each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import cdiv, launch, with_unit_stride
from slowfast_lara.attention.kernels.tiles import block_size, tile, weight_gradient_parts

# Largest number of frames in one tile of scores. With more frames, PyTorch computes the softmax.
MAX_TILE_FRAMES = 32


@torch.library.custom_op("slowfast_lara::temporal", mutates_args=())
def temporal(
    q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool
) -> tuple[Tensor, Tensor]:
    """Output of `temporal_attention`, and float32 attention weights [B,N,h,F]."""
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
    """Return x [B,F,N,D], copied if its last stride is not 1 or a clip spans 2**31 elements."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:]))
    return with_unit_stride(x) if last < 2**31 else x.contiguous()


def _pool(coeffs: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W_h (sum_f coeffs_nhf x_nf) + bias, [B,N,h,d], with the weight W_h of head h."""
    (B, N, h, F), d = coeffs.shape, weight.shape[1]
    out = x.new_empty(B, N, h, d)
    launch(
        "temporal.temporal_pool",
        x,
        *(coeffs, x, weight, weight if bias is None else bias, out),
        *(*x.stride()[:3], N, F, h, d),
        programs=B,
        blocks={"N": N, "H": h, "E": d},
        BIAS=bias is not None,
    )
    return out


def _sum(attention: Tensor, x: Tensor) -> Tensor:
    """sum_f attention_nhf (x_nf)_h, [B,N,h,d], with the columns (x_nf)_h of head h in x_nf."""
    (B, N, h, F), D = attention.shape, x.shape[3]
    out = x.new_empty(B, N, h, D // h)
    args = (attention, x, out, *x.stride()[:3], N, F, h, D // h)
    launch("temporal.temporal_sum", x, *args, programs=B, blocks={"N": N, "X": D})
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
    """q_nh.(W_h x_nf) after the `epilogue` of the kernel temporal_scores, [B,N,h,F] float32.

    If not `project`, W_h selects the columns of head h. `attention` and `scale` are inputs of the
    epilogue.
    """
    (B, N, h, d), F = q.shape, x.shape[1]
    out = q.new_empty(B, N, h, F, dtype=torch.float32)
    launch(
        "temporal.temporal_scores",
        q,
        *(q, x, weight, out if attention is None else attention, out),
        *(*x.stride()[:3], scale, N, F, h, d),
        programs=B,
        blocks={"N": N, "F": F, "H": h},
        BLOCK_F=min(block_size(F), MAX_TILE_FRAMES),
        PROJECT=project,
        EPILOGUE=epilogue,
        num_warps=8 if project else 4,  # with 8 warps, PROJECT=False spills on sm_90
    )
    return out


@temporal.register_fake
def _(q: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(*q.shape[:3], x.shape[1], dtype=torch.float32)


@torch.library.custom_op("slowfast_lara::temporal_backward", mutates_args=())
def temporal_backward(
    q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool,
    attention: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, x, weight and bias; the last is empty if `bias` is None."""
    x = _with_32_bit_offsets(x)
    q, weight, grad = (tensor.contiguous() for tensor in (q, weight, grad))
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
    launch(
        "temporal.temporal_backward_tokens",
        q,
        *(q, grad, w_k, w_v, attention, grad_scores, grad_x, N, F, h, d),
        programs=B,
        blocks={"N": N, "X": h * d, "F": F},
        PROJECT=project_values,
    )
    grad_q = _pool(grad_scores, x, w_k)
    grad_weight = torch.zeros_like(weight)
    grad_weight[: h * d] = _weight_gradient(q, x, grad_scores)
    if project_values:
        grad_weight[h * d :] = _weight_gradient(grad, x, attention)
    # The bias of the keys cancels in the softmax, so its gradient is zero.
    grad_bias = grad.new_empty(0) if bias is None else torch.zeros_like(bias)
    if bias is not None and project_values:
        grad_bias[h * d :] = grad.sum((0, 1)).flatten()
    return grad_q, grad_x, grad_weight, grad_bias


def _weight_gradient(q: Tensor, x: Tensor, coeffs: Tensor) -> Tensor:
    """sum_n q_nh (sum_f coeffs_nhf x_nf)^T, [D,D] float32, from partial sums over the tokens."""
    (B, N, h, d), F = q.shape, x.shape[1]
    kernel = "temporal_backward_weight"
    blocks = B * cdiv(N, tile(kernel, element_size=q.element_size())["BLOCK_N"])
    steps = cdiv(blocks, weight_gradient_parts(B * N))
    out = q.new_empty(cdiv(blocks, steps), h * d, h * d, dtype=torch.float32)
    launch(
        f"temporal.{kernel}",
        q,
        *(q, x, coeffs, out, *x.stride()[:3], B, N, F, h, d, steps),
        programs=out.shape[0],
        blocks={"H": h, "E": d, "X": h * d},
    )
    return out.sum(0)


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
