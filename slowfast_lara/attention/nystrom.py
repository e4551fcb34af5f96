"""Nyström attention: a low-rank approximation through segment means.

Xiong et al., "Nystromformer", AAAI 2021. The landmarks q~ and k~ are shared by all frames, as in
Motionformer. The output for frame f, with keys k_f and values v_f, and with all logits scaled by
1/sqrt(d), is

    softmax(q.k~) pinv(softmax(q~.k~)) softmax(q~.k_f) v_f

Third-order Newton-Schulz iterations compute the pseudo-inverse. Their initial value is scaled for
each matrix separately, so that the result of a clip does not depend on the rest of the batch.
Attention weights may be negative, so outputs can leave the range of the values.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from slowfast_lara.attention.landmarks import segment_means
from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.softmax import combine_landmarks, softmax_attention, softmax_weights
from slowfast_lara.attention.tensors import at_least_float32


@at_least_float32
def nystrom_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    *,
    num_frames: int = 1,
    pinv_iterations: int = 6,
) -> Tensor:
    """Nyström attention: q [B,h,N,d]; k, v [B,h,F*P,d]; landmarks [B,h,C,d] -> [B,h,N,F,d]."""
    inverse = pseudo_inverse(softmax_weights(q_landmarks, k_landmarks), pinv_iterations)
    means = softmax_attention(q_landmarks, k, v, num_frames=num_frames)  # [B,h,C,F,d]
    means = inverse @ means.flatten(3)
    return combine_landmarks(softmax_weights(q, k_landmarks), means, num_frames)


def pseudo_inverse(x: Tensor, iterations: int) -> Tensor:
    """Approximate Moore-Penrose inverse of matrices [...,C,C] with non-negative entries."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    largest_sums = x.sum(-2).amax(-1) * x.sum(-1).amax(-1)
    inverse = x.mT / largest_sums[..., None, None]
    for _ in range(iterations):
        product = x @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        inverse = inverse @ (13 * identity - product @ inner) / 4
    return inverse


@register("nystrom")
class NystromAttention(Estimator):
    landmarks_are_tokens = True

    def __init__(
        self,
        *,
        num_landmarks: int,
        pinv_iterations: Annotated[int, "number of Newton-Schulz iterations"] = 6,
    ) -> None:
        super().__init__()
        self.num_landmarks, self.pinv_iterations = num_landmarks, pinv_iterations

    @at_least_float32
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        landmarks = (segment_means(x, self.num_landmarks, num_frames=num_frames) for x in (q, k))
        return nystrom_attention(
            q, k, v, *landmarks, num_frames=num_frames, pinv_iterations=self.pinv_iterations
        )
