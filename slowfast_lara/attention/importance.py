"""Self-normalised importance sampling: what Performer and LARA share.

In the scaled space (q and k times d**-0.25), with log xi(x, w) = w.x - |x|^2/2,
samples w_c and weights a'_nc, per frame (eq. 2 and the last equation of sec. 4.3):

    sum_c a'_nc xi(q_n,w_c) A_cf / sum_c a'_nc xi(q_n,w_c) B_cf
    A_cf = sum_p xi(k_fp,w_c) v_fp,   B_cf = sum_p xi(k_fp,w_c)

The factor exp(-|q_n|^2/2) cancels. With L_cf = log B_cf and M_cf = A_cf / B_cf,
the mean of the values that sample c sees, the estimate is

    sum_c softmax_c(log a'_nc + q_n.w_c + L_cf) M_cf:

stable at any scale, and inside the range of the frame's values.

On a CPU, frames are taken one by one, and the backward pass makes their weights anew:
nothing of shape [N,F,C] is ever made. On an NVIDIA GPU (importance_gpu.py) it is one fused
attention.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, C samples, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention.exporting import is_exporting
from slowfast_lara.attention.frames import split_frames
from slowfast_lara.attention.importance_gpu import as_attention, has_operators
from slowfast_lara.attention.kernels.choice import Kernels, missing_sizes, takes_triton
from slowfast_lara.attention.precision import to_float32, without_autocast
from slowfast_lara.attention.samples import SMALLEST_ALPHA, QueryWeights, Samples, scaled

# Two limits on a CPU, in elements; the result is the same with any.
# The weights of a frame, [N,C] for a few heads at once, are made and used while they
# still are in the processor's cache (2**18 float32 are 1 MB).
_CPU_CHUNK = 2**18
# The scores, [B,h,N,C] for a group of heads, are kept small enough that the memory
# allocator reuses one block for all groups. A larger block (2**21 float32 are 8 MB) is
# given back to the operating system and fetched anew, page by page, at every operation.
_CPU_GROUP = 2**21


class Statistics(NamedTuple):
    """What each query scores each sample, and what each sample sees of each frame."""

    scores: Tensor  # log a'_nc + q_n.w_c, [B,h,N,C]
    log_sums: Tensor  # L_cf, [B,h,F,C]
    means: Tensor  # M_cf, [B,h,F,C,d]


def log_xi(x: Tensor, samples: Tensor) -> Tensor:
    """log xi(x_m, w_c) = w_c.x_m - |x_m|^2/2: x [...,M,d], samples [...,C,d] -> [...,C,M]."""
    return add_product(-x.square().sum(-1).unsqueeze(-2) / 2, samples, x.mT)


def add_product(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x + left @ right, without the product as a tensor of its own; x broadcasts."""
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
    frames: int,
    kernels: Kernels = "auto",
) -> Tensor:
    """q [B,h,N,d]; k, v [B,h,F*P,d] -> the estimate above, [B,h,N,F,d], in the precision of q.

    `make_samples` gets k and all else that is given: tensors [B,h,C,...], or None. On a CPU
    it is called for a few heads at a time.
    """
    with without_autocast(q.device.type):
        given = tuple(map(to_float32, given))
        missing = missing_sizes(q.shape[-1], given[0].shape[2])
        if k.shape != v.shape:
            missing = missing or "values of another shape than the keys"
        if takes_triton(kernels, q, missing):
            from slowfast_lara.attention.kernels.estimates import by_kernels

            return by_kernels(q, k, v, make_samples(k, *given), frames)
        if has_operators(q) and not is_exporting():
            return as_attention(q, k, v, make_samples(k, *given), frames)
        tensors = (*map(to_float32, (q, k, v)), *given)

        def statistics(heads: slice) -> Statistics:
            some: list[Any] = [x if x is None else x[:, heads] for x in tensors]
            q, k, v, *others = some
            return _statistics(q, k, v, make_samples(k, *others), frames)

        h = q.shape[1]
        if is_exporting():
            return _mix_frames(statistics(slice(0, h))).to(q.dtype)
        size = max(1, _CPU_GROUP // max(1, q.shape[0] * q.shape[2] * given[0].shape[2]))
        groups = [statistics(slice(start, start + size)) for start in range(0, h, size)]
        return _MixFrames.apply(*(x for group in groups for x in group)).to(q.dtype)


def _statistics(q: Tensor, k: Tensor, v: Tensor, samples: Samples, frames: int) -> Statistics:
    points, log_weights, query_weights = samples
    q, w = scaled(q), points.mT
    if query_weights is None:
        scores = q @ w
    else:
        scores = add_product(_LogOfClamped.apply(alpha(q, query_weights)), q, w)
    k_frames, v_frames = split_frames(scaled(k), frames), split_frames(v, frames)
    each_frame = points.unsqueeze(2).expand(-1, -1, frames, -1, -1)
    logits = log_xi(k_frames, each_frame)  # [B,h,F,C,P]
    shares = logits.softmax(-1)
    means = shares @ v_frames
    # The largest share is 1 over the sum of exp(logits - largest logit).
    log_sums = logits.amax(-1) - shares.amax(-1).log()
    if log_weights is not None:
        log_sums = log_sums + log_weights.unsqueeze(2)
    return Statistics(scores, log_sums, means)


def alpha(q: Tensor, weights: QueryWeights) -> Tensor:
    """alpha_nc before the clamp, [B,h,N,C]; q in the scaled space."""
    landmarks, *columns = weights
    balance, gain, shares = (x.unsqueeze(-2) for x in columns)  # [B,h,1,C]
    favour = (q @ landmarks.mT).softmax(-2)
    return torch.addcmul(balance, gain, favour - favour @ shares.mT)


class _LogOfClamped(torch.autograd.Function):
    """log(max(alpha, 1e-8)) in one tensor, the only one that the backward pass keeps."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor) -> Tensor:
        out = alpha.clamp(min=SMALLEST_ALPHA).log_()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        free = out > math.log(SMALLEST_ALPHA)
        return grad * torch.where(free, (-out).exp(), 0.0)


def _mix_frames(statistics: Statistics) -> Tensor:
    """What `_MixFrames` computes, in plain operations on the whole batch."""
    scores, log_sums, means = statistics
    frames = [
        (scores + log_sums[:, :, f, None]).softmax(-1) @ means[:, :, f]
        for f in range(means.shape[2])
    ]
    return torch.stack(frames, dim=3)


class _MixFrames(torch.autograd.Function):
    """softmax_c(scores + log_sums of a frame) @ means of the frame, for groups of heads."""

    @staticmethod
    def forward(ctx: Any, *groups: Tensor) -> Tensor:
        heads = sum(scores.shape[1] for scores in groups[::3])
        (B, _, N, _), (_, _, F, _, d) = groups[0].shape, groups[2].shape
        # The layout that the temporal stage of trajectory attention reads.
        out = groups[0].new_empty(B, F, N, heads, d).permute(0, 3, 2, 1, 4)
        for (scores, log_sums, means), part in _group_by_group(groups, out):
            for b, some in _parts(scores):
                for f in range(F):
                    weights = (scores[b, some] + log_sums[b, some, f, None]).softmax(-1)
                    part[b, some, :, f] = weights @ means[b, some, f]
        ctx.save_for_backward(*groups)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        grads: list[Tensor] = []
        for (scores, log_sums, means), part in _group_by_group(ctx.saved_tensors, grad):
            grad_scores = torch.zeros_like(scores)
            grad_log_sums, grad_means = torch.empty_like(log_sums), torch.empty_like(means)
            for b, some in _parts(scores):
                for f in range(means.shape[2]):
                    weights = (scores[b, some] + log_sums[b, some, f, None]).softmax(-1)
                    g = part[b, some, :, f]
                    grad_means[b, some, f] = weights.mT @ g
                    grad_weights = g @ means[b, some, f].mT
                    mean_grad = (weights * grad_weights).sum(-1, keepdim=True)
                    grad_logits = grad_weights.sub_(mean_grad).mul_(weights)
                    grad_scores[b, some] += grad_logits
                    grad_log_sums[b, some, f] = grad_logits.sum(-2)
            grads += [grad_scores, grad_log_sums, grad_means]
        return tuple(grads)


def _group_by_group(
    groups: tuple[Tensor, ...], whole: Tensor
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """The three tensors of each group of heads, and these heads of `whole` [B,h,...]."""
    start = 0
    for i in range(0, len(groups), 3):
        end = start + groups[i].shape[1]
        yield groups[i : i + 3], whole[:, start:end]
        start = end


def _parts(scores: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads."""
    B, h, N, C = scores.shape
    size = max(1, _CPU_CHUNK // (N * C))
    for b in range(B):
        for start in range(0, h, size):
            yield slice(b, b + 1), slice(start, min(start + size, h))
