"""An estimator over all tokens of a sequence, with prefix tokens and frames.

Prefix tokens (CLS, registers) attend exactly: they are few, and models read their result from CLS.
They are also keys of all other tokens, because pretrained models concentrate attention on them.

The estimator receives the patches space-major, as in Motionformer. A landmark that is the mean of a
segment of tokens then covers few spatial positions over time.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from slowfast_lara.attention import build_estimator
from slowfast_lara.attention.registry import estimator_class
from slowfast_lara.attention.sdpa import fused_attention
from slowfast_lara.hf.layouts import TokenLayout

DEFAULT_NUMBER = 128  # as in build_estimator


class JointEstimator(nn.Module):
    """The estimator `name` over a whole sequence, with `number` landmarks, samples or groups."""

    def __init__(
        self, name: str, layout: TokenLayout, number: int | None = None, **arguments: Any
    ) -> None:
        super().__init__()
        for key, value, least in (("prefix", layout.prefix, 0), ("frames", layout.frames, 1)):
            if type(value) is not int or value < least:
                raise ValueError(f"{key} is {value!r}; must be an integer of at least {least}")
        number = DEFAULT_NUMBER if number is None else number
        self.estimator = build_estimator(name, num_landmarks=number, **arguments)
        self.number = number if has_number(name) else 0
        self.layout = layout

    def obstacle(self, tokens: int) -> str:
        """The reason why a sequence of this length needs exact attention, or an empty string."""
        patches = tokens - self.layout.prefix
        if patches > self.number:
            return ""
        return f"too few tokens: {patches} patches, {self.number} groups or landmarks"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """q, k, v [B,h,N,d] -> [B,h,N,d]; `scale` is the factor of the logits, default d**-0.5."""
        factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
        if abs(factor - 1) > 1e-6:
            q = q * factor
        if self.estimator.exact:
            return self.estimator(q, k, v).squeeze(3)
        prefix, frames = self.layout.prefix, self.layout.frames_of(q.shape[2])
        ordered = [_swap_axes(x, prefix, (frames, -1)) for x in (q, k, v)]
        out = _swap_axes(self.estimator(*ordered).squeeze(3), prefix, (-1, frames))
        if not prefix:
            return out
        exact = fused_attention(q[:, :, :prefix], k, v)
        return torch.cat((exact, out[:, :, prefix:]), dim=2)


def _swap_axes(x: Tensor, prefix: int, axes: tuple[int, int]) -> Tensor:
    """Transpose the grid of patches, which has the shape `axes`; prefix tokens do not move."""
    if 1 in axes:
        return x
    patches = x[:, :, prefix:].unflatten(2, axes).transpose(2, 3).flatten(2, 3)
    return torch.cat((x[:, :, :prefix], patches), dim=2) if prefix else patches


def has_number(name: str) -> bool:
    """Whether an estimator has landmarks, samples or groups."""
    return "num_landmarks" in inspect.signature(estimator_class(name)).parameters


def one_number(groups: int | None, num_landmarks: int | None) -> int | None:
    """The number given as `groups` or as `num_landmarks`; None if neither is given."""
    if groups is not None and num_landmarks is not None:
        raise TypeError("groups and num_landmarks are two names for one argument; give only one")
    return groups if num_landmarks is None else num_landmarks
