"""Orthoformer attention: landmarks are the most orthogonal queries.

Patrick et al., "Keeping Your Eye on the Ball", NeurIPS 2021, sec. 3.3. C query tokens are selected
greedily as landmarks: the next landmark is the token whose largest |cosine| to the landmarks
selected so far is smallest. With the landmarks l, with the keys k_f and values v_f of frame f, and
with all logits scaled by 1/sqrt(d), the output is

    softmax(q.l) softmax(l.k_f) v_f

The first landmark is random in training and token 0 in eval mode.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.attention.landmarks import check_landmarks
from slowfast_lara.attention.registry import LandmarkEstimator, register
from slowfast_lara.attention.softmax import combine_landmarks, softmax_attention, softmax_weights
from slowfast_lara.attention.tensors import at_least_float32, gather_tokens


@at_least_float32
def orthoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_landmarks: int,
    num_frames: int = 1,
    first_landmark: int | None = None,
) -> Tensor:
    """Orthoformer attention: q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d].

    `first_landmark` is the index of the first query to select; None: drawn at random.
    """
    # detach, not no_grad: torch.export fails at a no_grad region inside an autocast region.
    chosen = orthogonal_tokens(q.detach(), num_landmarks, first_landmark)
    landmarks = gather_tokens(q, chosen)
    means = softmax_attention(landmarks, k, v, num_frames=num_frames)  # [B,h,C,F,d]
    return combine_landmarks(softmax_weights(q, landmarks), means.flatten(3), num_frames)


def orthogonal_tokens(q: Tensor, num_landmarks: int, first_landmark: int | None) -> Tensor:
    """Select landmarks among the queries [B,h,N,d]; returns their indices [B,h,C,1]."""
    B, h, N, _ = q.shape
    check_landmarks(num_landmarks, N)
    if first_landmark is None:
        chosen = torch.randint(N, (B, h, 1, 1), device=q.device)
    else:
        if not 0 <= first_landmark < N:
            raise ValueError(f"expected first_landmark from 0 to {N - 1}, got {first_landmark}")
        chosen = torch.full((B, h, 1, 1), first_landmark, device=q.device)
    # If `directions` were not contiguous, each matmul below would copy it.
    directions = functional.normalize(q, dim=-1).contiguous()
    indices, nearest = [chosen], q.new_zeros(B, h, N, 1)
    for _ in range(num_landmarks - 1):
        cosines = directions @ gather_tokens(directions, chosen).mT  # [B,h,N,1]
        nearest = torch.maximum(nearest, cosines.abs())
        # 2 exceeds any |cosine|, so a selected token is not selected again.
        nearest = nearest.scatter(2, chosen, 2.0)
        chosen = nearest.argmin(2, keepdim=True)
        indices.append(chosen)
    return torch.cat(indices, dim=2)


@register("orthoformer")
class OrthoformerAttention(LandmarkEstimator):
    landmarks_are_tokens = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return orthoformer_attention(
            q,
            k,
            v,
            num_landmarks=self.num_landmarks,
            num_frames=num_frames,
            first_landmark=None if self.training else 0,
        )
