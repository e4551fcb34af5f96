"""Orthoformer attention: through the most orthogonal queries.

Patrick et al., "Keeping Your Eye on the Ball", NeurIPS 2021, sec. 3.3: C query
tokens are chosen one after the other, each the one whose largest |cosine| to
those already chosen is smallest. With these landmarks l:

    softmax(q.l) softmax_f(l.k_f) v_f

The first one is drawn at random in training and is token 0 in eval mode.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.attention.landmarks import check_landmarks
from slowfast_lara.attention.precision import at_least_float32
from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.sampling import take_tokens
from slowfast_lara.attention.softmax import softmax_attention, softmax_weights, spread_frames


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
    """q [B,h,N,d]; k, v [B,h,F*P,d] -> [B,h,N,F,d]. No first landmark: a random one."""
    # Not by no_grad: torch.export fails at such a region within one without autocast.
    chosen = orthogonal_tokens(q.detach(), num_landmarks, first_landmark)
    landmarks = take_tokens(q, chosen)
    seen = softmax_attention(landmarks, k, v, num_frames=num_frames)  # [B,h,C,F,d]
    return spread_frames(softmax_weights(q, landmarks), seen.flatten(3), num_frames)


def orthogonal_tokens(q: Tensor, num_landmarks: int, first_landmark: int | None) -> Tensor:
    """The chosen tokens' indices [B,h,C,1]."""
    B, h, N, _ = q.shape
    check_landmarks(num_landmarks, N)
    if first_landmark is None:
        chosen = torch.randint(N, (B, h, 1, 1), device=q.device)
    else:
        if not 0 <= first_landmark < N:
            raise ValueError(f"first landmark {first_landmark} of {N} tokens; 0 to {N - 1} allowed")
        chosen = torch.full((B, h, 1, 1), first_landmark, device=q.device)
    # Contiguous, or each of the products below would copy them.
    directions = functional.normalize(q, dim=-1).contiguous()
    indices, nearest = [chosen], q.new_zeros(B, h, N, 1)
    for _ in range(num_landmarks - 1):
        cosines = directions @ take_tokens(directions, chosen).mT  # [B,h,N,1]
        nearest = torch.maximum(nearest, cosines.abs())
        # A chosen token gets 2, which no |cosine| reaches: it is not chosen again.
        nearest = nearest.scatter(2, chosen, 2.0)
        chosen = nearest.argmin(2, keepdim=True)
        indices.append(chosen)
    return torch.cat(indices, dim=2)


@register("orthoformer")
class OrthoformerAttention(Estimator):
    landmarks_are_tokens = True

    def __init__(self, *, num_landmarks: int) -> None:
        super().__init__()
        self.num_landmarks = num_landmarks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return orthoformer_attention(
            q,
            k,
            v,
            num_landmarks=self.num_landmarks,
            num_frames=num_frames,
            first_landmark=None if self.training else 0,
        )
