"""Importance sampling on a GPU as fused attention, in the dtype of q.

The estimate

    sum_c softmax_c(log alpha_nc + q_n.w_c + log_weights_c + L_cf) M_cf

(notation of importance_sampling.py and samples.py) is attention with the samples w_c as keys, the
means M_cf as values and log alpha_nc as a mask. log_weights_c + L_cf does not depend on the query,
so extra components of the keys hold it. L_cf and M_cf are also results of attention, with the
samples as queries and the frame's keys as keys. The normalisers of r_nc are results of attention
with the landmarks as queries and q as keys. Memory traffic dominates the time on a GPU, so only the
mask and its terms have the shape [N,C]. Weights that do not depend on the query need no mask.

Half precision rounds the samples and landmarks. All dot products use the same rounded values, so
rounding a sample has the effect of a slightly different sample. L_cf, norms and log-normalisers
must not be rounded and are split into two components (components.py). log alpha_nc is rounded.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, C samples, d head size; d' is
d plus the extra components, rounded up to a multiple of 8 as the fused kernels require.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.attention.components import (
    UNIT,
    append_biases,
    append_split,
    append_units,
    append_zeros,
)
from slowfast_lara.attention.samples import MIN_ALPHA, Samples
from slowfast_lara.attention.sdpa import fused_attention
from slowfast_lara.attention.softmax import frames_last
from slowfast_lara.attention.tensors import scaled, split_frames

# alpha is multiplied by this factor, because its minimum 1e-8 underflows in float16. The factor
# cancels in the softmax over samples.
_ALPHA_UNIT = 1024.0


def estimate_by_sdpa(q: Tensor, k: Tensor, v: Tensor, samples: Samples, num_frames: int) -> Tensor:
    """The estimate in the dtype of q: q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d]."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    # In this file q and k are not scaled; w includes the factor d**-0.25 of q and k instead.
    w = scaled(samples.w).to(q.dtype).flatten(0, 1)  # [B*h,C,d]
    log_sums, means = _key_stats(k, v, w, num_frames)
    if samples.log_weights is not None:
        log_sums = log_sums + samples.log_weights.flatten(0, 1).unsqueeze(1)
    queries = append_units(q.permute(2, 0, 1, 3)).flatten(1, 2).transpose(0, 1)  # [B*h,N,d']
    mask = None
    if samples.query_weights is not None:
        landmarks, balance, gain, shares = (x.flatten(0, 1) for x in samples.query_weights)
        columns = (balance * _ALPHA_UNIT, gain * _ALPHA_UNIT, shares)
        weights = (scaled(landmarks), *(x.unsqueeze(-1) for x in columns))
        mask = _LogAlpha.apply(queries, *(x.to(q.dtype) for x in weights))
        mask = mask.expand(num_frames, -1, -1, -1)
    out = fused_attention(
        queries.expand(num_frames, -1, -1, -1),
        append_biases(w.unsqueeze(1).expand(-1, num_frames, -1, -1), log_sums).transpose(0, 1),
        means.transpose(0, 1),
        attn_mask=mask,
        scale=1.0,
    )
    return frames_last(out, q.shape[1])


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Unscaled attention, and the log-sum-exp of each query's logits, which has no gradient.

    This calls the operators behind `scaled_dot_product_attention`, because that function does not
    return the log-sum-exp.
    """
    aten = torch.ops.aten
    if q.device.type == "cpu":  # used only by tests
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)
    out, sums, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=1.0)
    return out, sums[..., : q.shape[2]]  # remove the padding of the log-sum-exp


def _key_stats(k: Tensor, v: Tensor, w: Tensor, num_frames: int) -> tuple[Tensor, Tensor]:
    """Key statistics: L_cf [B*h,F,C] up to a constant per head and frame, and M_cf [B*h,F,C,d].

    k, v [B,h,F*P,d] are not scaled; w [B*h,C,d] includes the factor d**-0.25 of k.
    """
    d = k.shape[-1]
    k, v = (split_frames(x, num_frames) for x in (k, v))
    keys = append_biases(k, _HalfNorms.apply(k) * d**-0.5).flatten(0, 1)  # [B*h,F,P,d']
    queries = append_units(w).unsqueeze(1).expand(-1, num_frames, -1, -1)
    values = append_zeros(v, keys.shape[-1] - d).flatten(0, 1)
    means, log_sums = _attention(queries, keys, values)
    if torch.is_grad_enabled():
        mean_keys, _ = _attention(queries.detach(), keys.detach(), keys)
        log_sums = _WithGradient.apply(log_sums, queries, mean_keys)
    return log_sums, means[..., : v.shape[-1]]


class _WithGradient(torch.autograd.Function):
    """Return log_sums unchanged, and compute the gradient that the fused operator lacks.

    The gradient of logsumexp_p(query.key_p) equals that of query.mean_key, if the softmax weights
    in mean_key are constants.
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
    """-|x|^2/2 of [...,d] in float32, without a float32 copy of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.linalg.vector_norm(x, dim=-1, dtype=wide).square() / -2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * -grad.unsqueeze(-1).to(x.dtype)


class _LogAlpha(torch.autograd.Function):
    """log(_ALPHA_UNIT * alpha_nc), [B*h,N,C].

    Inputs: queries [B*h,N,d'] from `append_units`; landmarks [B*h,C,d]; `balance`, `gain` and
    `shares` [B*h,C,1], of which `balance` and `gain` are already multiplied by _ALPHA_UNIT.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, *weights: Tensor) -> Tensor:
        landmarks, balance, gain, shares = weights
        padded = append_zeros(landmarks, queries.shape[-1] - landmarks.shape[-1])
        # Landmarks attend to the queries: mean_q = sum_n r_nc q_n, sums = log-normalisers of r_nc.
        mean_q, sums = (x[0] for x in _attention(padded[None], queries[None], queries[None]))
        r = (queries @ append_split(landmarks, -sums.unsqueeze(-1) / UNIT).mT).exp_()
        rbar = r @ shares
        alpha = torch.addcmul(balance.mT, gain.mT, r - rbar)
        ctx.width = landmarks.shape[-1]
        ctx.save_for_backward(queries, padded, gain, shares, mean_q, r, rbar, alpha)
        # The log of a negative alpha is NaN, which fmax replaces by `smallest`.
        smallest = alpha.new_full((), math.log(MIN_ALPHA * _ALPHA_UNIT))
        return torch.fmax(alpha.log(), smallest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of the inputs from these gradients of intermediate results.

        alpha_nc:           y_nc = grad_nc / alpha_nc, or 0 if alpha_nc was clamped
        r_nc:               dr_nc = gain_c y_nc - shares_c s_n,   s_n = sum_c gain_c y_nc
        the logit of r_nc:  r_nc (dr_nc - column_c),   column_c = sum_n r_nc dr_nc

        To save memory, z_nc = r_nc y_nc overwrites y_nc.
        """
        saved = (*ctx.saved_tensors, grad)
        if grad.dtype == torch.float16:  # 1 / alpha would overflow in float16
            saved = tuple(x.float() for x in saved)
        queries, landmarks, gain, shares, mean_q, r, rbar, alpha, grad = saved
        y = grad / functional.threshold(alpha, MIN_ALPHA * _ALPHA_UNIT, math.inf)
        y_sums = y.mT @ functional.pad(rbar, (0, 1), value=1.0)  # sum_n y_nc (rbar_n, 1)
        s = y @ gain
        z = y.mul_(r)
        # The last component of each query is UNIT. So the last columns of `z_sums` and `r_sums` are
        # UNIT sum_n z_nc and UNIT sum_n r_nc s_n.
        z_sums, r_sums = z.mT @ queries, r.mT @ (s * queries)
        z_sum, r_sum = (x[..., -1:] / UNIT for x in (z_sums, r_sums))
        column = gain * z_sum - shares * r_sum
        grad_queries = (z @ (gain * landmarks)).baddbmm_(r, column * landmarks, alpha=-1)
        grad_queries.addcmul_(s, r @ (shares * landmarks), value=-1)
        grad_landmarks = gain * z_sums - shares * r_sums - column * mean_q
        grads = (
            grad_queries,
            grad_landmarks[..., : ctx.width],
            y_sums[..., 1:],
            z_sum - y_sums[..., :1],
            -r_sum,
        )
        return tuple(x.to(ctx.saved_tensors[0].dtype) for x in grads)
