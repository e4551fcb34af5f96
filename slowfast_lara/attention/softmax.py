"""Exact softmax attention per frame, without storing the attention matrix.

`softmax_attention` is the spatial stage of Motionformer, which all other estimators approximate.
For several frames, it calls fused attention (sdpa.py) with the frames as batch dimension and with
clips and heads as head dimension. This avoids a copy of q for each frame, and gives the output the
memory layout that the temporal stage of trajectory attention reads.
"""

from __future__ import annotations

from torch import Tensor

from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.sdpa import fused_attention
from slowfast_lara.attention.tensors import split_frames


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1, dropout: float = 0.0
) -> Tensor:
    """Exact attention: q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d]."""
    if num_frames == 1:
        return fused_attention(q, k, v, dropout_p=dropout).unsqueeze(3)
    q_frames = frames_first(q.unsqueeze(2)).expand(num_frames, -1, -1, -1)
    k_frames, v_frames = (frames_first(split_frames(x, num_frames)) for x in (k, v))
    out = fused_attention(q_frames, k_frames, v_frames, dropout_p=dropout)
    return frames_last(out, q.shape[1])


def frames_first(x: Tensor) -> Tensor:
    """[B,h,F,M,d] -> [F,B*h,M,d], with the memory order [F,M,B*h,d].

    Fused kernels write an output with the strides of q, so the output has this order too.
    """
    return x.permute(2, 3, 0, 1, 4).flatten(2, 3).transpose(1, 2)


def frames_last(x: Tensor, heads: int) -> Tensor:
    """[F,B*h,N,d] -> [B,h,N,F,d]."""
    return x.unflatten(1, (-1, heads)).permute(1, 2, 3, 0, 4)


def softmax_weights(q: Tensor, k: Tensor) -> Tensor:
    """Attention weights [B,h,N,C]; the tensor is stored, so N or C should be small."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def combine_landmarks(weights: Tensor, means: Tensor, num_frames: int) -> Tensor:
    """weights [B,h,N,C] @ mean values of each landmark and frame [B,h,C,F*d] -> [B,h,N,F,d]."""
    return (weights @ means).unflatten(3, (num_frames, -1))


@register("softmax")
class SoftmaxAttention(Estimator):
    exact = True

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return softmax_attention(q, k, v, num_frames=num_frames, dropout=dropout)
