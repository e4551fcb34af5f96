"""The estimates of importance sampling by the operators `seen` and `mix`.

What is as small as the samples stays in PyTorch, in float32; q, k and v are taken as they are.
"""

from __future__ import annotations

from torch import Tensor

from slowfast_lara.attention.kernels.combine import mix
from slowfast_lara.attention.kernels.key_stats import seen
from slowfast_lara.attention.samples import Samples, scaled


def by_kernels(q: Tensor, k: Tensor, v: Tensor, samples: Samples, num_frames: int) -> Tensor:
    """q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d], in the precision of q."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    log_sums, means, *_ = seen(samples.points, k, v, num_frames, True)
    if samples.log_weights is not None:
        log_sums = log_sums + samples.log_weights.unsqueeze(2)
    query_weights = samples.query_weights or (None, None, None, None)
    return mix(q, samples.points, log_sums, means, *query_weights)[0]


def attention_of_landmarks(landmarks: Tensor, k: Tensor) -> Tensor:
    """softmax_attention(landmarks, k, k) for few queries, in float32: [B,h,C,d]."""
    _, means, rest, _ = seen(scaled(landmarks), k, None, 1, False)
    # Samples are made of them, and stand in an exponent: with what rounding took.
    return (means if rest.numel() == 0 else means.float() + rest).squeeze(2)
