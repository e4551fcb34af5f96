"""Textbook trajectory attention: the equations of the paper, without optimisations.

The layer materialises the attention matrix of the spatial stage, and in the temporal stage projects
the F keys and F values of every query. Tests and benchmarks use it as the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slowfast_lara.models.space_time import TrajectoryAttention


class TextbookTrajectoryAttention(nn.Module):
    """Exact trajectory attention that shares the weights of a TrajectoryAttention."""

    def __init__(self, layer: TrajectoryAttention) -> None:
        super().__init__()
        self.qkv, self.proj_q, self.proj_kv = layer.qkv, layer.proj_q, layer.proj_kv
        self.proj, self.num_heads = layer.proj, layer.num_heads
        self.project_values = layer.project_values

    def split_heads(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., h, d]."""
        return x.unflatten(-1, (self.num_heads, -1))

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        q, k, v = (self.split_heads(y).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        scale = q.shape[-1] ** -0.5
        cls = (q[:, :, :1] @ k.mT * scale).softmax(-1) @ v  # [B,h,1,d]

        q, k, v = q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]
        attention = (q @ k.mT * scale).unflatten(3, (num_frames, -1)).softmax(-1)  # [B,h,N,F,P]
        values = v.unflatten(2, (num_frames, -1))
        paths = torch.einsum("bhnfp,bhfpd->bnfhd", attention, values).flatten(3)  # [B,N,F,D]

        by_frame = paths.unflatten(1, (num_frames, -1))  # [B,F,P,F,D]
        own = torch.cat([by_frame[:, f, :, f] for f in range(num_frames)], dim=1)
        q2 = self.split_heads(self.proj_q(own))
        k2, v2 = map(self.split_heads, self.proj_kv(paths).chunk(2, dim=-1))
        values = v2 if self.project_values else self.split_heads(paths)
        weights = torch.einsum("bnhd,bnfhd->bnhf", q2 * scale, k2).softmax(-1)
        patches = torch.einsum("bnhf,bnfhd->bnhd", weights, values).flatten(2)
        return self.proj(torch.cat((cls.transpose(1, 2).flatten(2), patches), dim=1))
