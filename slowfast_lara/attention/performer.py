"""Performer: random feature attention (RFA) with positive features.

Choromanski et al., "Rethinking Attention with Performers", ICLR 2021; here as
self-normalised importance sampling with the proposal N(0, I), eq. 2 of the LARA
paper: S samples for each head, shared by all queries and frames. As in the
paper's appendix G.1, samples are drawn anew at every training step, one fixed set
serves in eval mode, and they are not orthogonal unless asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from slowfast_lara.attention.importance import estimate
from slowfast_lara.attention.kernels.choice import Kernels
from slowfast_lara.attention.registry import Estimator, register
from slowfast_lara.attention.samples import Samples
from slowfast_lara.attention.sampling import seeded_normal


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    num_frames: int = 1,
    kernels: Kernels = "auto",
) -> Tensor:
    """q [B,h,N,d]; k, v [B,h,F*P,d]; projection [h,S,d], the samples -> [B,h,N,F,d]."""
    points = projection.expand(*q.shape[:2], *projection.shape[-2:])
    given = (lambda _, points: Samples(points), q, k, v, points)
    return estimate(*given, frames=num_frames, kernels=kernels)


def orthogonalise(gaussian: Tensor) -> Tensor:
    """Samples [h,S,d] that are orthogonal in blocks of d, with the lengths they had."""
    blocks = gaussian.split(gaussian.shape[-1], dim=-2)
    directions = [torch.linalg.qr(block.mT)[0].mT for block in blocks]
    return torch.cat(directions, dim=-2) * gaussian.norm(dim=-1, keepdim=True)


@register("performer")
class PerformerAttention(Estimator):
    projection: Tensor  # the samples of eval mode, [h,S,d]; a buffer, so that checkpoints have it

    def __init__(
        self,
        *,
        head_dim: int,
        num_heads: int,
        num_landmarks: int,
        seed: int,
        features: Annotated[
            Literal["positive", "hyperbolic"],
            "the randomised mapping xi(x, w) = exp(w.x - |x|^2/2), of each sample w (positive) "
            "or of w and -w (hyperbolic; appendix C)",
        ] = "positive",
        orthogonal: Annotated[
            bool, "draw w_1, w_2, ... orthogonal to each other, in blocks of d samples"
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
        given = (q, k, v, samples)
        return performer_attention(*given, num_frames=num_frames, kernels=self.kernels)
