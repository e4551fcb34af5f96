"""Mixup and CutMix.

Mixup (Zhang et al. 2018) is a weighted sum of two clips. CutMix (Yun et al. 2019) replaces a
rectangle of one clip by that of another clip, at the same position in all frames. In a batch of B
clips, clip i is mixed with clip B - 1 - i. All clips of a batch are mixed with the same random
numbers, drawn on the host from the batch's seed, so that the host does not wait for the device.

The loss is the mean of the losses for the two labels, weighted by the mixing weights. This equals
the loss for the mixed label, with or without label smoothing, because (binary) cross-entropy is
linear in the label. A prediction counts as correct if it is the label of the clip with the larger
weight, so that the training accuracy can reach 100 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor


class Mix(NamedTuple):
    """Mixing weight of the original clip; for CutMix, the rectangle taken from the other clip."""

    own: float = 1.0
    cut: tuple[int, int, int, int] | None = None  # top, bottom, left, right


NOT_MIXED = Mix()


def draw_mix(mixup: CfgNode, height: int, width: int, seed: int) -> Mix:
    """Draw the mixing weight and rectangle for a batch; `mixup` is the config node MIXUP."""
    rng = np.random.default_rng(seed)
    if not mixup.ENABLE or rng.random() >= mixup.PROB:
        return NOT_MIXED
    cuts = rng.random() < mixup.SWITCH_PROB if mixup.ALPHA else True
    if cuts and mixup.CUTMIX_ALPHA:
        return _draw_cut(rng.beta(mixup.CUTMIX_ALPHA, mixup.CUTMIX_ALPHA), height, width, rng)
    return Mix(float(rng.beta(mixup.ALPHA, mixup.ALPHA)))


def _draw_cut(own: float, height: int, width: int, rng: np.random.Generator) -> Mix:
    """Draw a rectangle with the frame's aspect ratio and a random centre; crop it to the frame."""
    side = math.sqrt(1 - own)
    rows, columns = round(height * side), round(width * side)
    top, left = int(rng.integers(height)) - rows // 2, int(rng.integers(width)) - columns // 2
    bottom, right = min(top + rows, height), min(left + columns, width)
    top, left = max(top, 0), max(left, 0)
    # A rectangle cropped at the frame's border is smaller: recompute the original clip's weight.
    own = 1 - (bottom - top) * (right - left) / (height * width)
    return Mix(own, (top, bottom, left, right))


def mix_clips(clips: Tensor, mix: Mix) -> Tensor:
    """Mix clip i of [B, ..., H, W] with clip B - 1 - i."""
    if mix == NOT_MIXED:
        return clips
    others = clips.flip(0)
    if mix.cut is None:
        return torch.lerp(others, clips, mix.own)
    top, bottom, left, right = mix.cut
    mixed = clips.clone()
    mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return mixed


def mixed_loss(loss: Callable[[Tensor], Tensor], labels: Tensor, mix: Mix) -> Tensor:
    """Return the loss for the mixed labels; `loss` computes the loss for unmixed labels."""
    if mix.own == 1:
        return loss(labels)
    return mix.own * loss(labels) + (1 - mix.own) * loss(labels.flip(0))


def main_labels(labels: Tensor, mix: Mix) -> Tensor:
    """Return, for each mixed clip, the label with the larger mixing weight."""
    return labels if mix.own >= 0.5 else labels.flip(0)
