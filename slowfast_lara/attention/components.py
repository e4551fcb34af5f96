"""Biases of attention logits as extra components of the head.

Fused attention takes a bias of its logits only as a mask [N,M], which some kernels do not support
and which needs memory traffic for every query. A bias that depends on the key alone fits into extra
components instead: the keys hold the bias, and the queries hold a constant factor.

In half precision the bias is split into two components, the rounded value and the remainder, both
divided by `UNIT` to stay in float16's range. The queries have the constant `UNIT` in these
components. d' is d plus the two components, rounded up to a multiple of 8 as fused kernels require.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 256.0


def append_units(x: Tensor) -> Tensor:
    """[...,d] -> [...,d']: append `UNIT`, the factor of the components from `append_biases`."""
    more = 2 + -(x.shape[-1] + 2) % 8
    return torch.cat((x, x.new_full((), UNIT).expand(*x.shape[:-1], more)), dim=-1)


def append_biases(x: Tensor, biases: Tensor) -> Tensor:
    """x [...,M,d] and biases [...,M] -> [...,M,d']: append the biases, as split components.

    A dot product with a vector from `append_units` then adds the bias to the logit. The largest
    bias is subtracted first, because a shift of all M biases cancels in the softmax over them.
    """
    biases = biases - biases.detach().amax(-1, keepdim=True)
    return append_split(x, biases.unsqueeze(-1) / UNIT)


def append_split(x: Tensor, biases: Tensor) -> Tensor:
    """[...,d] and [...,1] -> [...,d']: append the rounded biases, their remainders and zeros."""
    rounded = biases.detach().to(x.dtype)
    return append_zeros(x, -(x.shape[-1] + 2) % 8, rounded, (biases - rounded).to(x.dtype))


def append_zeros(x: Tensor, number: int, *between: Tensor) -> Tensor:
    """Append `between` and zeros in one pass over memory; cat and pad would be two passes."""
    return torch.cat((x, *between, x.new_zeros(()).expand(*x.shape[:-1], number)), dim=-1)
