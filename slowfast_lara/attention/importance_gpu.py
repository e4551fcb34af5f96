"""Importance sampling on a GPU, as fused attention in the precision of q.

    sum_c softmax_c(log alpha_nc + q_n.w_c + L_cf) M_cf

is attention with the samples as keys, the means M as values and log alpha as a mask; L, of
the samples alone, rides along as more components of the keys. L and M are themselves of
attention, with the samples as queries, and so are the sums over the queries in alpha. On a
GPU the time is that of going through memory, and of size [N,C] there is only the mask; where
alpha is the same for all queries there is none.

Half precision rounds the samples and landmarks. What is rounded is used throughout, so that
they are others by a rounding, and nothing of it is lost in an exponential. Numbers that must
not be rounded (L, norms, log-sums) are two components, the rounded value and the rest, and
meet a constant component of the other side, `_UNIT`, which keeps them within float16.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, C samples, d head size;
d' is d and the components beside it, a multiple of 8, as fused kernels want it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.attention.frames import split_frames
from slowfast_lara.attention.samples import SMALLEST_ALPHA, QueryWeights, Samples, scaled
from slowfast_lara.attention.softmax import frames_last

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_UNIT = 256.0
# alpha is times this, which cancels between the samples: float16 has nothing below 6e-8.
_ALPHA_UNIT = 1024.0


def has_operators(x: Tensor) -> bool:
    """Whether PyTorch has the fused attention of `_attention` for tensors like x."""
    return x.device.type in ("cuda", "meta") and x.dtype in _DTYPES


def as_attention(q: Tensor, k: Tensor, v: Tensor, samples: Samples, num_frames: int) -> Tensor:
    """q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d], in the precision of q."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    # q and k are not scaled, so the samples are scaled twice.
    points = scaled(samples.points).to(q.dtype).flatten(0, 1)  # [B*h,C,d]
    log_sums, means = _seen(k, v, points, num_frames)
    if samples.log_weights is not None:
        log_sums = log_sums + samples.log_weights.flatten(0, 1).unsqueeze(1)
    queries = _with_units(q.permute(2, 0, 1, 3)).flatten(1, 2).transpose(0, 1)  # [B*h,N,d']
    mask = None
    if samples.query_weights is not None:
        mask = _LogAlpha.apply(queries, *_for_products(samples.query_weights, q.dtype))
        mask = mask.expand(num_frames, -1, -1, -1)
    out = functional.scaled_dot_product_attention(
        queries.expand(num_frames, -1, -1, -1),
        _with_sums(points.unsqueeze(1).expand(-1, num_frames, -1, -1), log_sums).transpose(0, 1),
        means.transpose(0, 1),
        attn_mask=mask,
        scale=1.0,
    )
    return frames_last(out, q.shape[1])


def _with_units(x: Tensor) -> Tensor:
    """[...,d] -> [...,d'], with constants to meet the components of `_with_sums`."""
    more = 2 + -(x.shape[-1] + 2) % 8
    return torch.cat((x, x.new_full((), _UNIT).expand(*x.shape[:-1], more)), dim=-1)


def _with_sums(x: Tensor, sums: Tensor) -> Tensor:
    """[...,M,d] and [...,M] -> [...,M,d'], whose products with `_with_units` have the sums added.

    What is the same for all M cancels in a softmax over them: the largest is taken off.
    """
    sums = ((sums - sums.detach().amax(-1, keepdim=True)) / _UNIT).unsqueeze(-1)
    return _with_parts(x, sums)


def _with_parts(x: Tensor, sums: Tensor) -> Tensor:
    rounded = sums.detach().to(x.dtype)
    return _with_zeros(x, -(x.shape[-1] + 2) % 8, rounded, (sums - rounded).to(x.dtype))


def _with_zeros(x: Tensor, number: int, *between: Tensor) -> Tensor:
    """In one pass; functional.pad would fill the tensor first."""
    return torch.cat((x, *between, x.new_zeros(()).expand(*x.shape[:-1], number)), dim=-1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention without scale, and the logarithm of each query's sum, which has no gradient.

    PyTorch's own operators behind `scaled_dot_product_attention`: that one keeps the sums.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":  # so that tests can run it
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)
    out, sums, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=1.0)
    return out, sums[..., : q.shape[2]]  # its rows are padded


def _seen(k: Tensor, v: Tensor, points: Tensor, num_frames: int) -> tuple[Tensor, Tensor]:
    """L but for a shift of each frame [B*h,F,C], and M [B*h,F,C,d].

    k, v [B,h,F*P,d]; points [B*h,C,d], scaled twice.
    """
    d = k.shape[-1]
    k, v = (split_frames(x, num_frames) for x in (k, v))
    keys = _with_sums(k, _HalfNorms.apply(k) * d**-0.5).flatten(0, 1)  # [B*h,F,P,d']
    queries = _with_units(points).unsqueeze(1).expand(-1, num_frames, -1, -1)
    values = _with_zeros(v, keys.shape[-1] - d).flatten(0, 1)
    means, log_sums = _attention(queries, keys, values)
    if torch.is_grad_enabled():
        mean_keys, _ = _attention(queries.detach(), keys.detach(), keys)
        log_sums = _SumsWithGradient.apply(log_sums, queries, mean_keys)
    return log_sums, means[..., : v.shape[-1]]


class _SumsWithGradient(torch.autograd.Function):
    """The log-sums as they are, with a gradient.

    It is the mean gradient of their logits: that of the product of the query with the mean of
    the keys, as if the weights of this mean were constant.
    """

    @staticmethod
    def forward(ctx: Any, log_sums: Tensor, queries: Tensor, mean_keys: Tensor) -> Tensor:
        ctx.save_for_backward(queries, mean_keys)
        return log_sums.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, mean_keys = ctx.saved_tensors
        grad = grad.unsqueeze(-1).to(queries.dtype)
        return None, grad * mean_keys, grad * queries


class _HalfNorms(torch.autograd.Function):
    """-|x|^2/2 of [...,d], without a tensor of that size in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.linalg.vector_norm(x, dim=-1, dtype=wide).square() / -2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * -grad.unsqueeze(-1).to(x.dtype)


def _for_products(weights: QueryWeights, dtype: torch.dtype) -> list[Tensor]:
    """Landmarks [B*h,C,d], balance, gain and shares [B*h,C,1] as `_LogAlpha` takes them."""
    landmarks, balance, gain, shares = (x.flatten(0, 1) for x in weights)
    columns = (balance * _ALPHA_UNIT, gain * _ALPHA_UNIT, shares)
    return [scaled(landmarks).to(dtype), *(x.unsqueeze(-1).to(dtype) for x in columns)]


class _LogAlpha(torch.autograd.Function):
    """log alpha [B*h,N,C] but for a constant, of queries [B*h,N,d'] with units."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, *weights: Tensor) -> Tensor:
        landmarks, balance, gain, shares = weights
        padded = _with_zeros(landmarks, queries.shape[-1] - landmarks.shape[-1])
        # The sums of the softmax over the queries, and what they favour, [B*h,C,d'].
        favoured, sums = (x[0] for x in _attention(padded[None], queries[None], queries[None]))
        favour = (queries @ _with_parts(landmarks, -sums.unsqueeze(-1) / _UNIT).mT).exp_()
        mean = favour @ shares
        alpha = torch.addcmul(balance.mT, gain.mT, favour - mean)
        ctx.width = landmarks.shape[-1]
        ctx.save_for_backward(queries, padded, gain, shares, favoured, favour, mean, alpha)
        # NaN below zero, which fmax takes for less than anything.
        smallest = alpha.new_full((), math.log(SMALLEST_ALPHA * _ALPHA_UNIT))
        return torch.fmax(alpha.log(), smallest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """In products with few columns: beside y, which becomes z, nothing [N,C] is made.

        With y = grad / alpha and z = r y, the gradient of r is gain_c y_nc - shares_c s_n,
        where s_n = sum_c gain_c y_nc; the softmax over n takes off each column's mean of it.
        """
        saved = (*ctx.saved_tensors, grad)
        if grad.dtype == torch.float16:  # whose range is too small for 1 / alpha
            saved = tuple(x.float() for x in saved)
        queries, landmarks, gain, shares, favoured, favour, mean, alpha, grad = saved
        y = grad / functional.threshold(alpha, SMALLEST_ALPHA * _ALPHA_UNIT, math.inf)
        y_sums = y.mT @ functional.pad(mean, (0, 1), value=1.0)  # over n, times (mean_n, 1)
        s = y @ gain
        z = y.mul_(favour)
        # Over n, times q_n and, by the units, times 1.
        z_sums, r_sums = z.mT @ queries, favour.mT @ (s * queries)
        z_sum, r_sum = (x[..., -1:] / _UNIT for x in (z_sums, r_sums))
        column = gain * z_sum - shares * r_sum
        grad_queries = (z @ (gain * landmarks)).baddbmm_(favour, column * landmarks, alpha=-1)
        grad_queries.addcmul_(s, favour @ (shares * landmarks), value=-1)
        grad_landmarks = gain * z_sums - shares * r_sums - column * favoured
        grads = (
            grad_queries,
            grad_landmarks[..., : ctx.width],
            y_sums[..., 1:],
            z_sum - y_sums[..., :1],
            -r_sum,
        )
        return tuple(x.to(ctx.saved_tensors[0].dtype) for x in grads)
