"""Biases of attention logits as extra components of queries and keys.

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
    """Queries [...,d] -> [...,d']: fill the additional components with `UNIT`.

    `append_biases` divides the biases by `UNIT`, so this factor cancels in the dot product.
    """
    more = 2 + -(x.shape[-1] + 2) % 8
    return torch.cat((x, x.new_full((), UNIT).expand(*x.shape[:-1], more)), dim=-1)


def append_biases(x: Tensor, biases: Tensor) -> Tensor:
    """Keys x [...,M,d] and biases [...,M] -> [...,M,d']: append each bias as two components.

    To keep the components small, the largest bias is subtracted from all M biases; this cancels in
    the softmax. The dot product with a query from `append_units` includes the resulting bias.
    """
    biases = biases - biases.detach().amax(-1, keepdim=True)
    return append_split(x, biases.unsqueeze(-1) / UNIT)


def append_split(x: Tensor, biases: Tensor) -> Tensor:
    """x [...,d], biases [...,1] -> [...,d']: append rounded biases, remainders and zeros."""
    rounded = biases.detach().to(x.dtype)
    return append_zeros(x, -(x.shape[-1] + 2) % 8, rounded, (biases - rounded).to(x.dtype))


def append_zeros(x: Tensor, number: int, *between: Tensor) -> Tensor:
    """Append `between`, then `number` zeros, in one copy; `cat` and `pad` would copy twice."""
    return torch.cat((x, *between, x.new_zeros(()).expand(*x.shape[:-1], number)), dim=-1)
