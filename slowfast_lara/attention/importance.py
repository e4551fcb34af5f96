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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.frames import split_frames

# Weights [N,C] of so many elements stay in a CPU's cache.
_CPU_CHUNK = 2**18


def scale_down(x: Tensor) -> Tensor:
    """Into the scaled space, where q.k is the usual logit."""
    return x * x.shape[-1] ** -0.25


def log_xi(x: Tensor, samples: Tensor) -> Tensor:
    """log xi(x_m, w_c) = w_c.x_m - |x_m|^2/2: x [...,M,d], samples [...,C,d] -> [...,C,M]."""
    return samples @ x.mT - x.square().sum(-1).unsqueeze(-2) / 2


def sampled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    samples: Tensor,
    *,
    num_frames: int,
    log_weights: Tensor | None = None,
    log_sample_weights: Tensor | None = None,
) -> Tensor:
    """The estimate above: q, k in the scaled space; samples [B,h,C,d] -> [B,h,N,F,d].

    log a' is the sum of `log_weights` [B,h,N,C] and `log_sample_weights` [B,h,C],
    the part that is the same for all queries; None is zero.
    """
    scores = q @ samples.mT
    if log_weights is not None:
        scores = scores + log_weights
    k_frames, v_frames = split_frames(k, num_frames), split_frames(v, num_frames)
    logits = log_xi(k_frames, samples.unsqueeze(2))  # [B,h,F,C,P]
    largest = logits.detach().amax(-1, keepdim=True)
    features = (logits - largest).exp()
    sums = features.sum(-1, keepdim=True)
    means = (features @ v_frames) / sums  # [B,h,F,C,d]
    log_sums = (largest + sums.log()).squeeze(-1)
    if log_sample_weights is not None:
        log_sums = log_sums + log_sample_weights.unsqueeze(2)
    return _MixFrames.apply(scores, log_sums, means)


class _MixFrames(torch.autograd.Function):
    """softmax_c(scores [B,h,N,C] + log_sums [B,h,F,C]) @ means [B,h,F,C,d]."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, log_sums: Tensor, means: Tensor) -> Tensor:
        B, h, N, C = scores.shape
        F, d = means.shape[2], means.shape[4]
        # The layout that the temporal stage of trajectory attention reads.
        out = scores.new_empty(B, F, N, h, d).permute(0, 3, 2, 1, 4)
        for b, heads in _parts(scores):
            for f in range(F):
                weights = (scores[b, heads] + log_sums[b, heads, f, None]).softmax(-1)
                out[b, heads, :, f] = weights @ means[b, heads, f]
        ctx.save_for_backward(scores, log_sums, means, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores, log_sums, means, out = ctx.saved_tensors
        grad_scores = torch.zeros_like(scores)
        grad_log_sums, grad_means = torch.empty_like(log_sums), torch.empty_like(means)
        for b, heads in _parts(scores):
            for f in range(means.shape[2]):
                weights = (scores[b, heads] + log_sums[b, heads, f, None]).softmax(-1)
                g = grad[b, heads, :, f]
                grad_means[b, heads, f] = weights.mT @ g
                mean_grad = (g * out[b, heads, :, f]).sum(-1, keepdim=True)
                grad_logits = (g @ means[b, heads, f].mT).sub_(mean_grad).mul_(weights)
                grad_scores[b, heads] += grad_logits
                grad_log_sums[b, heads, f] = grad_logits.sum(-2)
        return grad_scores, grad_log_sums, grad_means


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
