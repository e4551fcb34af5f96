"""Random draws that leave the global random state alone.

In training, estimators draw from torch's global generators, as dropout does. In
eval mode, a draw is the same each time: it comes from a seed.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

Noise = Annotated[
    float | Literal["code"],
    "the size of the noise in training, as a factor of the paper's; code is that of the "
    "authors' public code, d**-0.25, which adds the noise before it scales q and k",
]


def noise_size(noise: float | Literal["code"], head_dim: int) -> float:
    return head_dim**-0.25 if noise == "code" else noise


# An operator of its own, because torch.compile cannot trace a generator, and so
# that the meta device, which has none, gets its shape.
@torch.library.custom_op("slowfast_lara::seeded_normal", mutates_args=())
def seeded_normal(like: Tensor, seed: int) -> Tensor:
    """Standard normal numbers from a seed, in the shape and place of `like`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


@seeded_normal.register_fake
def _(like: Tensor, seed: int) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def draw_components(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Indices drawn from the last dimension [..., M], by numbers in [0, 1) [..., 1]."""
    cumulative = probabilities.detach().cumsum(-1)
    # Relative to the last entry, which rounding leaves beside 1.
    target = (uniform * cumulative[..., -1:]).contiguous()
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp(max=probabilities.shape[-1] - 1)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """x [...,M,d] at index [...,C,1] -> [...,C,d]."""
    return x.gather(-2, index.expand(*index.shape[:-1], x.shape[-1]))
