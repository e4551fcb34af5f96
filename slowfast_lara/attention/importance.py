"""Self-normalised importance sampling: what Performer and LARA share.

In the scaled space (q and k times d**-0.25), with log xi(x, w) = w.x - |x|^2/2,
samples w_c and weights a'_nc, per frame (eq. 2 and the last equation of sec. 4.3):

    sum_c a'_nc xi(q_n,w_c) A_cf / sum_c a'_nc xi(q_n,w_c) B_cf
    A_cf = sum_p xi(k_fp,w_c) v_fp,   B_cf = sum_p xi(k_fp,w_c)

The factor exp(-|q_n|^2/2) cancels. With L_cf = log B_cf and M_cf = A_cf / B_cf,
the mean of the values that sample c sees, the estimate is

    sum_c softmax_c(log a'_nc + q_n.w_c + L_cf) M_cf:

stable at any scale, and inside the range of the frame's values.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, C samples,
d head size. Nothing of shape [N,F,C] is ever made: frames are taken one by one,
and the backward pass makes their weights anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention.exporting import is_exporting
from slowfast_lara.attention.frames import split_frames

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


def scale_down(x: Tensor) -> Tensor:
    """Into the scaled space, where q.k is the usual logit."""
    return x * x.shape[-1] ** -0.25


def log_xi(x: Tensor, samples: Tensor) -> Tensor:
    """log xi(x_m, w_c) = w_c.x_m - |x_m|^2/2: x [...,M,d], samples [...,C,d] -> [...,C,M]."""
    return add_product(-x.square().sum(-1).unsqueeze(-2) / 2, samples, x.mT)


def add_product(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x + left @ right, without the product as a tensor of its own; x broadcasts."""
    batch = left.shape[:-2]
    shape = (*batch, left.shape[-2], right.shape[-1])
    parts = (x.expand(shape), left, right.expand(*batch, *right.shape[-2:]))
    return torch.baddbmm(*(part.flatten(0, -3) for part in parts)).view(shape)


def by_head_groups(prepare: Callable[..., Statistics]) -> Callable[..., Tensor]:
    """Decorator: from a function that makes `Statistics` to one that makes the estimate.

    All tensors it is given (q, k, v, landmarks, ...) are [B,h,...]. The function is
    called for a few heads at a time, and their parts are mixed to one [B,h,N,F,d].
    """

    @functools.wraps(prepare)
    def estimate(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, *args: Any, **kwargs: Any):
        B, h, N, _ = q.shape
        if is_exporting():
            return _mix_frames(prepare(q, k, v, landmarks, *args, **kwargs))
        size = max(1, _CPU_GROUP // (B * N * landmarks.shape[2])) if q.device.type == "cpu" else h
        groups: list[Tensor] = []
        for start in range(0, h, size):
            heads = slice(start, start + size)
            some = [_take_heads(x, heads) for x in (q, k, v, landmarks, *args)]
            options = {name: _take_heads(x, heads) for name, x in kwargs.items()}
            groups.extend(prepare(*some, **options))
        return _MixFrames.apply(*groups)

    return estimate


def _take_heads(x: Any, heads: slice) -> Any:
    return x[:, heads] if isinstance(x, Tensor) else x


def sampled_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    samples: Tensor,
    *,
    num_frames: int,
    log_weights: Tensor | None = None,
    log_sample_weights: Tensor | None = None,
) -> Statistics:
    """What the estimate above is made of: q, k in the scaled space, samples [B,h,C,d].

    log a' is the sum of `log_weights` [B,h,N,C] and `log_sample_weights` [B,h,C],
    the part that is the same for all queries; None is zero.
    """
    w = samples.mT
    scores = q @ w if log_weights is None else add_product(log_weights, q, w)
    k_frames, v_frames = split_frames(k, num_frames), split_frames(v, num_frames)
    each_frame = samples.unsqueeze(2).expand(-1, -1, num_frames, -1, -1)
    logits = log_xi(k_frames, each_frame)  # [B,h,F,C,P]
    shares = logits.softmax(-1)
    means = shares @ v_frames
    # The largest share is 1 over the sum of exp(logits - largest logit).
    log_sums = logits.amax(-1) - shares.amax(-1).log()
    if log_sample_weights is not None:
        log_sums = log_sums + log_sample_weights.unsqueeze(2)
    return Statistics(scores, log_sums, means)


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
    """Slices of batch and heads: small ones on a CPU, all at once elsewhere."""
    B, h, N, C = scores.shape
    if scores.device.type != "cpu":
        yield slice(B), slice(h)
        return
    size = max(1, _CPU_CHUNK // (N * C))
    for b in range(B):
        for start in range(0, h, size):
            yield slice(b, b + 1), slice(start, min(start + size, h))
