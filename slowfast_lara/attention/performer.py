"""Performer: random feature attention (RFA) with positive features.

Choromanski et al., "Rethinking Attention with Performers", ICLR 2021. RFA is self-normalised
importance sampling with the proposal N(0, I) (LARA paper, eq. 2), and is computed in this form.
Each head has S samples, shared by all queries and frames. As in appendix G.1 of the LARA paper,
every training step draws new samples, eval mode uses one fixed set, and by default the samples are
not orthogonal.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from slowfast_lara.attention.importance_sampling import estimate
from slowfast_lara.attention.kernels.choice import Kernels
from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.samples import Samples, seeded_normal


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    num_frames: int = 1,
    kernels: Kernels = "torch",
) -> Tensor:
    """Performer: q [B,h,N,d]; k, v [B,h,F*P,d]; samples `projection` [h,S,d] -> [B,h,N,F,d]."""
    w = projection.expand(*q.shape[:2], *projection.shape[-2:])
    return estimate(
        lambda k, triton, w: Samples(w), q, k, v, w, num_frames=num_frames, kernels=kernels
    )


def orthogonalise(gaussian: Tensor) -> Tensor:
    """Orthogonalise the samples [h,S,d] within each block of d samples; keep their norms."""
    blocks = gaussian.split(gaussian.shape[-1], dim=-2)
    directions = [torch.linalg.qr(block.mT)[0].mT for block in blocks]
    return torch.cat(directions, dim=-2) * gaussian.norm(dim=-1, keepdim=True)


@register("performer")
class PerformerAttention(Estimator):
    projection: Tensor  # samples for eval mode, [h,S,d]; a buffer, saved in checkpoints

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_landmarks: int,
        seed: int,
        features: Annotated[
            Literal["positive", "hyperbolic"],
            "random features exp(w.x - |x|^2/2); positive: one feature for each sample w; "
            "hyperbolic: two features, for w and -w (appendix C of the LARA paper)",
        ] = "positive",
        orthogonal: Annotated[
            bool, "make the samples in each block of d samples orthogonal to each other"
        ] = False,
        kernels: Kernels = "auto",
    ) -> None:
        super().__init__()
        count = num_landmarks * (2 if features == "hyperbolic" else 1)
        self.kernels, self.kernel_sizes = kernels, (head_dim, count)
        self.features, self.orthogonal = features, orthogonal
        samples = seeded_normal(torch.empty(num_heads, num_landmarks, head_dim), seed)
        self.register_buffer("projection", orthogonalise(samples) if orthogonal else samples)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        samples = self.projection
        if self.training:
            samples = torch.randn_like(samples)
            if self.orthogonal:
                samples = orthogonalise(samples)
        if self.features == "hyperbolic":
            samples = torch.cat((samples, -samples), dim=-2)
        kernels = self.chosen_kernels(q, k, v, num_frames)
        return performer_attention(q, k, v, samples, num_frames=num_frames, kernels=kernels)
