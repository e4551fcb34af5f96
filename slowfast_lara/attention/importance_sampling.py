"""Self-normalised importance sampling, the common form of Performer and LARA.

Queries q_n and keys k_fp are in the scaled space (multiplied by d**-0.25). With samples w_c, their
weights a'_nc and log xi(x, w) = w.x - |x|^2/2, the estimate for query n and frame f is (LARA paper,
eq. 2 and the last equation of sec. 4.3)

    sum_c a'_nc xi(q_n,w_c) A_cf / sum_c a'_nc xi(q_n,w_c) B_cf
    A_cf = sum_p xi(k_fp,w_c) v_fp,   B_cf = sum_p xi(k_fp,w_c)

The factor exp(-|q_n|^2/2) of xi(q_n,w_c) cancels. With the key statistics L_cf = log B_cf and
M_cf = A_cf / B_cf (a weighted mean of the frame's values), the estimate is

    sum_c softmax_c(log a'_nc + q_n.w_c + L_cf) M_cf

This form is stable at any scale, and its result stays inside the range of the frame's values.

`estimate` computes this in one of three ways: with Triton kernels, as fused attention on a GPU
(importance_sdpa.py), or in this file, frame by frame, with softmax weights that the backward pass
recomputes. None of them allocates a tensor of shape [N,F,C].

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, C samples, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention.importance_sdpa import estimate_by_sdpa
from slowfast_lara.attention.kernels import choice
from slowfast_lara.attention.kernels.combine import combine
from slowfast_lara.attention.kernels.key_stats import key_stats
from slowfast_lara.attention.samples import MIN_ALPHA, QueryWeights, Samples
from slowfast_lara.attention.sdpa import sdpa_supports
from slowfast_lara.attention.tensors import (
    is_exporting,
    scaled,
    split_frames,
    to_float32,
    without_autocast,
)

# Two size limits for CPUs, in elements. Neither changes the result.
# The softmax weights [N,C] of a frame are computed for a few heads at a time, so that they are
# still in the cache when they are used (2**18 float32 numbers are 1 MB).
CPU_CHUNK = 2**18
# The scores [B,h,N,C] are computed for one group of heads at a time. The memory allocator reuses
# the memory of temporaries of up to this size (8 MB in float32) for the next group. It returns
# larger blocks to the operating system, which maps them again, page by page, at every operation.
CPU_GROUP = 2**21


class Statistics(NamedTuple):
    """Scores of the queries and statistics of the keys, per sample."""

    scores: Tensor  # log alpha_nc + q_n.w_c (samples.py), [B,h,N,C]
    log_sums: Tensor  # L_cf + log_weights_c, [B,h,F,C]
    means: Tensor  # M_cf, [B,h,F,C,d]


def log_xi(x: Tensor, w: Tensor) -> Tensor:
    """log xi(x_m, w_c) = w_c.x_m - |x_m|^2/2: x [...,M,d], w [...,C,d] -> [...,C,M]."""
    return add_matmul(-x.square().sum(-1).unsqueeze(-2) / 2, w, x.mT)


def add_matmul(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute x + left @ right without a temporary for left @ right; x is broadcast."""
    batch = left.shape[:-2]
    shape = (*batch, left.shape[-2], right.shape[-1])
    parts = (x.expand(shape), left, right.expand(*batch, *right.shape[-2:]))
    return torch.baddbmm(*(part.flatten(0, -3) for part in parts)).view(shape)


def estimate(
    make_samples: Callable[..., Samples],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *given: Any,
    num_frames: int,
    kernels: choice.Kernels = "torch",
) -> Tensor:
    """Importance-sampling estimate: q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d], in q's dtype.

    `make_samples(k, triton, *given)` returns the samples. If `triton` is True, it may use Triton
    kernels. `given` are tensors [B,h,C,...]; all except the first may be None. On a CPU,
    `make_samples` is called for a few heads at a time, with these heads of k and of `given`.
    """
    with without_autocast(q.device.type):
        given = tuple(map(to_float32, given))
        C = given[0].shape[2]
        unsupported = choice.unsupported_sizes(q.shape[-1], C)
        if k.shape != v.shape:
            unsupported = unsupported or "values with a shape different from the keys'"
        if choice.uses_triton(kernels, "estimate", (q, k, v), unsupported=unsupported):
            return _by_triton(q, k, v, make_samples(k, True, *given), num_frames)
        if sdpa_supports(q):
            return estimate_by_sdpa(q, k, v, make_samples(k, False, *given), num_frames)
        tensors = (*map(to_float32, (q, k, v)), *given)

        def statistics_of(heads: slice) -> Statistics:
            group: list[Any] = [x if x is None else x[:, heads] for x in tensors]
            q, k, v, *others = group
            return statistics(q, k, v, make_samples(k, False, *others), num_frames)

        h = q.shape[1]
        if is_exporting():
            return combine_frames(statistics_of(slice(0, h))).to(q.dtype)
        size = max(1, CPU_GROUP // max(1, q.shape[0] * q.shape[2] * C))
        groups = [statistics_of(slice(start, start + size)) for start in range(0, h, size)]
        return _CombineFrames.apply(*(x for group in groups for x in group)).to(q.dtype)


def _by_triton(q: Tensor, k: Tensor, v: Tensor, samples: Samples, num_frames: int) -> Tensor:
    k, v = k.to(q.dtype), v.to(q.dtype)
    log_sums, means, *_ = key_stats(samples.w, k, v, num_frames)
    if samples.log_weights is not None:
        log_sums = log_sums + samples.log_weights.unsqueeze(2)
    query_weights = samples.query_weights or (None, None, None, None)
    return combine(q, samples.w, log_sums, means, *query_weights)[0]


def statistics(q: Tensor, k: Tensor, v: Tensor, samples: Samples, num_frames: int) -> Statistics:
    q, w = scaled(q), samples.w
    if samples.query_weights is None:
        scores = q @ w.mT
    else:
        scores = add_matmul(_ClampedLog.apply(alpha(q, samples.query_weights)), q, w.mT)
    k_frames, v_frames = split_frames(scaled(k), num_frames), split_frames(v, num_frames)
    logits = log_xi(k_frames, w.unsqueeze(2).expand(-1, -1, num_frames, -1, -1))  # [B,h,F,C,P]
    weights = logits.softmax(-1)
    means = weights @ v_frames
    # This is logsumexp_p(logits): the largest weight is 1 / sum_p exp(logit_p - max logit).
    log_sums = logits.amax(-1) - weights.amax(-1).log()
    if samples.log_weights is not None:
        log_sums = log_sums + samples.log_weights.unsqueeze(2)
    return Statistics(scores, log_sums, means)


def alpha(q: Tensor, weights: QueryWeights) -> Tensor:
    """Unclamped alpha_nc [B,h,N,C]; q must be multiplied by d**-0.25."""
    landmarks, *columns = weights
    balance, gain, shares = (x.unsqueeze(-2) for x in columns)  # [B,h,1,C]
    r = (q @ landmarks.mT).softmax(-2)
    return torch.addcmul(balance, gain, r - r @ shares.mT)


class _ClampedLog(torch.autograd.Function):
    """log(max(alpha, 1e-8)), saving only the result for the backward pass."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor) -> Tensor:
        out = alpha.clamp(min=MIN_ALPHA).log_()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        unclamped = out > math.log(MIN_ALPHA)
        return grad * torch.where(unclamped, (-out).exp(), 0.0)


def combine_frames(statistics: Statistics) -> Tensor:
    """The estimate from the statistics, in plain operations on the whole batch."""
    scores, log_sums, means = statistics
    frames = [
        (scores + log_sums[:, :, f, None]).softmax(-1) @ means[:, :, f]
        for f in range(means.shape[2])
    ]
    return torch.stack(frames, dim=3)


class _CombineFrames(torch.autograd.Function):
    """`combine_frames` for groups of heads; the backward pass recomputes the weights."""

    @staticmethod
    def forward(ctx: Any, *groups: Tensor) -> Tensor:
        heads = sum(scores.shape[1] for scores in groups[::3])
        (B, _, N, _), (_, _, F, _, d) = groups[0].shape, groups[2].shape
        # [B,F,N,h,d] is the memory layout that the temporal stage of trajectory attention reads.
        out = groups[0].new_empty(B, F, N, heads, d).permute(0, 3, 2, 1, 4)
        for scores, log_sums, means, part in _head_groups(groups, out):
            for at in _cache_chunks(scores):
                for f in range(F):
                    weights = (scores[at] + log_sums[*at, f, None]).softmax(-1)
                    part[*at, :, f] = weights @ means[*at, f]
        ctx.save_for_backward(*groups)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        grads: list[Tensor] = []
        for scores, log_sums, means, part in _head_groups(ctx.saved_tensors, grad):
            grad_scores = torch.zeros_like(scores)
            grad_log_sums, grad_means = torch.empty_like(log_sums), torch.empty_like(means)
            for at in _cache_chunks(scores):
                for f in range(means.shape[2]):
                    weights = (scores[at] + log_sums[*at, f, None]).softmax(-1)
                    g = part[*at, :, f]
                    grad_means[*at, f] = weights.mT @ g
                    grad_weights = g @ means[*at, f].mT
                    mean_grad = (weights * grad_weights).sum(-1, keepdim=True)
                    grad_logits = grad_weights.sub_(mean_grad).mul_(weights)
                    grad_scores[at] += grad_logits
                    grad_log_sums[*at, f] = grad_logits.sum(-2)
            grads += [grad_scores, grad_log_sums, grad_means]
        return tuple(grads)


def _head_groups(groups: tuple[Tensor, ...], x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield (scores, log_sums, means, slice of x [B,h,...]) for each group of heads."""
    parts = x.split([scores.shape[1] for scores in groups[::3]], dim=1)
    return zip(groups[::3], groups[1::3], groups[2::3], parts)


def _cache_chunks(scores: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices (clip, heads) of `scores`, of at most CPU_CHUNK elements or of one head."""
    B, h, N, C = scores.shape
    size = max(1, CPU_CHUNK // (N * C))
    for b in range(B):
        for start in range(0, h, size):
            yield slice(b, b + 1), slice(start, min(start + size, h))
