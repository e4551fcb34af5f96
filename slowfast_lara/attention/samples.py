"""Samples with their weights: what Performer and LARA tell importance sampling.

In the scaled space (q and k times d**-0.25), log a'_nc = log_weights_c + log alpha_nc, where

    alpha_nc = balance_c + gain_c (r_nc - sum_c' shares_c' r_nc'),   at least 1e-8

and r_nc, the softmax over all queries n of q_n.q~_c, tells how much sample c favours query n.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SMALLEST_ALPHA = 1e-8


class QueryWeights(NamedTuple):
    """What alpha_nc is made of, where it is not the same for all queries."""

    landmarks: Tensor  # q~_c, [B,h,C,d]
    balance: Tensor  # [B,h,C], as the two others
    gain: Tensor
    shares: Tensor


class Samples(NamedTuple):
    """Samples and their weights; None is zero."""

    points: Tensor  # w_c, [B,h,C,d]
    log_weights: Tensor | None = None  # [B,h,C]
    query_weights: QueryWeights | None = None


def scaled(x: Tensor) -> Tensor:
    """Into the scaled space, where q.k is the usual logit."""
    return x * x.shape[-1] ** -0.25
