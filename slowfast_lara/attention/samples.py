"""Weighted samples of an importance-sampling estimate, and random draws.

The weight a'_nc of sample c for query n is, in the scaled space (q and k times d**-0.25),

    log a'_nc = log_weights_c + log alpha_nc
    alpha_nc = max(balance_c + gain_c (r_nc - rbar_n), 1e-8)
    r_nc = softmax_n(q_n.q~_c),   rbar_n = sum_c shares_c r_nc

r_nc is the alignment score of query n and landmark q~_c, normalised over all queries. rbar_n is a
weighted sum of the alignment scores of query n. lara.py computes log_weights, balance, gain and
shares.

In training mode, random numbers come from torch's global generators, as in dropout. In eval mode,
they come from seeded generators, and the global random state does not change.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

MIN_ALPHA = 1e-8

Noise = Annotated[
    float | Literal["code"],
    "standard deviation of the noise in training; the paper uses 1; the word code means d**-0.25, "
    "as in the authors' public code, which adds the noise before it scales q and k",
]


class QueryWeights(NamedTuple):
    """The terms of alpha_nc, for sample weights that depend on the query."""

    landmarks: Tensor  # q~_c, [B,h,C,d]
    balance: Tensor  # [B,h,C], like `gain` and `shares`
    gain: Tensor
    shares: Tensor


class Samples(NamedTuple):
    """Samples and the terms of their weights."""

    w: Tensor  # [B,h,C,d]
    log_weights: Tensor | None = None  # [B,h,C]; None means 0
    query_weights: QueryWeights | None = None  # None means alpha_nc = 1


def noise_scale(noise: float | Literal["code"], head_dim: int) -> float:
    return head_dim**-0.25 if noise == "code" else noise


# This is a custom operator: torch.compile cannot trace a generator, and the meta device has none.
@torch.library.custom_op("slowfast_lara::seeded_normal", mutates_args=())
def seeded_normal(like: Tensor, seed: int) -> Tensor:
    """Standard normal numbers from a seed, with the shape, dtype and device of `like`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


@seeded_normal.register_fake
def _(like: Tensor, seed: int) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def draw_components(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw indices [...,1] from probabilities [...,M] by inverting the CDF at `uniform`."""
    cdf = probabilities.detach().cumsum(-1)
    # Scale by the last entry of the CDF, which rounding makes slightly different from 1.
    target = (uniform * cdf[..., -1:]).contiguous()
    index = torch.searchsorted(cdf, target, right=True)
    return index.clamp(max=probabilities.shape[-1] - 1)
