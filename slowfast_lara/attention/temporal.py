"""Temporal stage of trajectory attention: exact, without projecting every token of every frame.

Query n has one pooled token x_nf for every frame f. The stage computes

    a_nhf = softmax_f(q_nh . (W_k x_nf + b_k)_h / sqrt(d)),   y_nh = sum_f a_nhf v_nfh

with v = W_v x + b_v, or v = x itself. Projecting all N*F tokens to keys and values would cost
2 F D^2 MACs per query. Two identities reduce the cost by the factor F:

    q_nh . W_k,h x_nf = (W_k,h^T q_nh) . x_nf          project the query instead
    sum_f a_nhf W_v,h x_nf = W_v,h (sum_f a_nhf x_nf)  aggregate, then project

b_k adds the same number to the logits of all frames and cancels in the softmax. The absorbed
queries u_nh = W_k,h^T q_nh, [N,h,D], would be the largest tensor. A torch.autograd.Function
computes them chunk by chunk in the forward and in the backward pass, so that the whole tensor is
never allocated.

Shapes: B batch, h heads, N queries, n queries of a chunk, F frames, d head size, D = h*d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels import choice
from slowfast_lara.attention.kernels.temporal import temporal
from slowfast_lara.attention.tensors import is_exporting

# Queries per chunk, over all clips. On a CPU, the absorbed queries of a chunk stay in the cache;
# accelerators are faster with few, large matmuls.
CPU_CHUNK = 128
ACCELERATOR_CHUNK = 16384


def temporal_attention(
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    project_values: bool,
    kernels: str = "auto",
) -> Tensor:
    """Attend over the frames: q [B,N,h,d], x [B,F,N,D] -> [B,N,h,d].

    `weight` [2D,D] and `bias` [2D] project x to keys (first half) and values (second half).
    If `project_values` is False, the values are x, and the second halves are unused.
    """
    too_long = "clips of 2**31 elements or more" if math.prod(x.shape[1:]) >= 2**31 else ""
    tensors, options = (q, x, weight, bias), {"project_values": project_values}
    if choice.uses_triton(kernels, "temporal", tensors, options, too_long):
        return temporal(q, x, weight, bias, project_values)[0]
    q = q * q.shape[-1] ** -0.5
    if is_exporting():
        return _attend(q, x, weight, bias, project_values, slice(0, x.shape[2]))
    return _TemporalAttention.apply(q, x, weight, bias, project_values)


def _chunks(x: Tensor) -> Iterator[slice]:
    budget = CPU_CHUNK if x.device.type == "cpu" else ACCELERATOR_CHUNK
    size = max(1, budget // max(1, x.shape[0]))
    for start in range(0, x.shape[2], size):
        yield slice(start, min(start + size, x.shape[2]))


def _tokens(x: Tensor, part: slice) -> Tensor:
    """[B,F,N,D] -> [B*n,F,D], the pooled tokens of a chunk (a view if B is 1)."""
    return x[:, :, part].transpose(1, 2).flatten(0, 1)


def _heads_first(x: Tensor, part: slice) -> Tensor:
    """[B,N,h,d] -> [h,B*n,d], the queries of a chunk."""
    return x[:, part].flatten(0, 1).transpose(0, 1)


def _frame_weights(q: Tensor, x: Tensor, w_k: Tensor) -> tuple[Tensor, Tensor]:
    """Absorbed queries [B*n,h,D] and their attention over the frames [B*n,h,F]."""
    absorbed = torch.bmm(q, w_k).transpose(0, 1)
    logits, wide = torch.bmm(absorbed, x.mT), torch.promote_types(x.dtype, torch.float32)
    return absorbed, logits.softmax(-1, dtype=wide).to(x.dtype)


def _attend(
    q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool, part: slice
) -> Tensor:
    """The output for the queries of a chunk, [B,n,h,d]."""
    h, d = q.shape[2:]
    w_k, w_v = weight.unflatten(0, (2, h, d))  # [h,d,D] each
    tokens = _tokens(x, part)
    _, attention = _frame_weights(_heads_first(q, part), tokens, w_k)
    if project_values:
        pooled = torch.bmm(attention, tokens)  # [B*n,h,D]
        y = torch.bmm(pooled.transpose(0, 1), w_v.mT).transpose(0, 1)
        if bias is not None:
            y = y + bias.unflatten(0, (2, h, d))[1]
    else:
        y = torch.einsum("nhf,nfhd->nhd", attention, tokens.unflatten(2, (h, d)))
    return y.unflatten(0, (-1, part.stop - part.start))


class _TemporalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool
    ) -> Tensor:
        out = torch.empty_like(q)
        for part in _chunks(x):
            out[:, part] = _attend(q, x, weight, bias, project_values, part)
        ctx.save_for_backward(q, x, weight)
        ctx.project_values, ctx.has_bias = project_values, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, x, weight = ctx.saved_tensors
        h, d = q.shape[2:]
        w_k, w_v = weight.unflatten(0, (2, h, d))
        grad_q, grad_x = torch.empty_like(q), torch.empty_like(x)
        # Sums over many chunks lose too many digits in half precision.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        grad_k, grad_v = grad_weight.unflatten(0, (2, h, d))
        for part in _chunks(x):
            sizes = (-1, part.stop - part.start)
            tokens, q_part = _tokens(x, part), _heads_first(q, part)
            absorbed, attention = _frame_weights(q_part, tokens, w_k)
            g = grad[:, part].flatten(0, 1)  # [B*n,h,d]
            if ctx.project_values:
                g_heads = g.transpose(0, 1)
                grad_v += torch.bmm(g_heads.mT, torch.bmm(attention, tokens).transpose(0, 1))
                grad_pooled = torch.bmm(g_heads, w_v).transpose(0, 1)  # [B*n,h,D]
                grad_attention = torch.bmm(grad_pooled, tokens.mT)
                grad_tokens = torch.bmm(attention.mT, grad_pooled)
            else:
                values = tokens.unflatten(2, (h, d))
                grad_attention = torch.einsum("nhd,nfhd->nhf", g, values)
                grad_tokens = torch.einsum("nhf,nhd->nfhd", attention, g).flatten(2)
            mean_grad = (attention * grad_attention).sum(-1, keepdim=True)
            grad_logits = grad_attention.sub_(mean_grad).mul_(attention)
            grad_tokens.baddbmm_(grad_logits.mT, absorbed)
            grad_x[:, :, part] = grad_tokens.unflatten(0, sizes).transpose(1, 2)
            grad_absorbed = torch.bmm(grad_logits, tokens).transpose(0, 1)  # [h,B*n,D]
            grad_q_part = torch.bmm(grad_absorbed, w_k.mT).transpose(0, 1)
            grad_q[:, part] = grad_q_part.unflatten(0, sizes)
            grad_k += torch.bmm(q_part.mT, grad_absorbed)
        grad_bias = None
        if ctx.has_bias:
            grad_bias = weight.new_zeros(2 * h * d)
            if ctx.project_values:
                grad_bias[h * d :] = grad.sum((0, 1)).flatten()
        return grad_q, grad_x, grad_weight.to(weight.dtype), grad_bias, None
