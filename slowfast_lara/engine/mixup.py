"""Mixup and CutMix.

Zhang et al., "mixup" (2018): a weighted sum of two clips. Yun et al., "CutMix" (2019): a
rectangle of the other clip, at the same position in all frames. Clip i of a batch is mixed with
clip -1 - i, and all clips of a batch share the random numbers. These are drawn on the host, from
the seed of the batch, so that the host does not wait for the device.

The loss is the mean of the losses of both labels, weighted by their share of the clip. It equals
the cross-entropy with the mixed label, with or without label smoothing, because that is linear in
the label. A prediction is correct if it is the label with the larger share, so that the training
accuracy can reach 100 %.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional


class Mix(NamedTuple):
    """Share of the own clip, and the rectangle of the other clip for CutMix."""

    own: float = 1.0
    cut: tuple[int, int, int, int] | None = None  # top, bottom, left, right


NOT_MIXED = Mix()


def draw_mix(mixup: CfgNode, height: int, width: int, seed: int) -> Mix:
    """Draw the mix of a batch of clips of the given size; `mixup` is the config node MIXUP."""
    rng = np.random.default_rng(seed)
    if not mixup.ENABLE or rng.random() >= mixup.PROB:
        return NOT_MIXED
    cuts = rng.random() < mixup.SWITCH_PROB if mixup.ALPHA else True
    if cuts and mixup.CUTMIX_ALPHA:
        return _draw_cut(rng.beta(mixup.CUTMIX_ALPHA, mixup.CUTMIX_ALPHA), height, width, rng)
    return Mix(float(rng.beta(mixup.ALPHA, mixup.ALPHA)))


def _draw_cut(own: float, height: int, width: int, rng: np.random.Generator) -> Mix:
    """Draw a rectangle with the aspect ratio of the frame and a random centre, cropped to it."""
    side = math.sqrt(1 - own)
    rows, columns = round(height * side), round(width * side)
    top, left = int(rng.integers(height)) - rows // 2, int(rng.integers(width)) - columns // 2
    bottom, right = min(top + rows, height), min(left + columns, width)
    top, left = max(top, 0), max(left, 0)
    # If the frame crops the rectangle, the own share is larger than the one drawn.
    own = 1 - (bottom - top) * (right - left) / (height * width)
    return Mix(own, (top, bottom, left, right))


def mix_clips(clips: Tensor, mix: Mix) -> Tensor:
    """Mix each clip of [B, ..., H, W] with its partner."""
    if mix == NOT_MIXED:
        return clips
    others = clips.flip(0)
    if mix.cut is None:
        return torch.lerp(others, clips, mix.own)
    top, bottom, left, right = mix.cut
    mixed = clips.clone()
    mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
    return mixed


def mixed_loss(logits: Tensor, labels: Tensor, mix: Mix, smoothing: float) -> Tensor:
    """Return the cross-entropy with the mixed labels."""
    loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    if mix.own == 1:
        return loss
    others = functional.cross_entropy(logits, labels.flip(0), label_smoothing=smoothing)
    return mix.own * loss + (1 - mix.own) * others


def main_labels(labels: Tensor, mix: Mix) -> Tensor:
    """Return the label with the larger share of each clip."""
    return labels if mix.own >= 0.5 else labels.flip(0)
