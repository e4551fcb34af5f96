"""Mixup and cutmix: each clip of a batch mixed with another one, and its label too.

Zhang et al., "mixup" (2018): a weighted sum of both clips. Yun et al., "CutMix" (2019): a
rectangle of the other clip, the same place in all frames. A clip's partner is the one at the
mirrored place of the batch, and all clips of a batch are mixed alike. What is random is drawn on
the host, by the seed of the batch, so that nothing waits for the device.

The labels count by their parts of the clip: the loss is the mean of both labels' losses with
these weights, which is the cross-entropy to the mixed label, smoothed or not, because that is
linear in it. A guess counts as right if it is the label with the larger part. So accuracies in
training can reach 100 %, and of a batch that is not mixed they are the usual ones.
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
    """How a batch is mixed: the part of a clip that stays its own, and what is cut into it."""

    own: float = 1.0
    # Top, bottom, left and right of cutmix's rectangle.
    cut: tuple[int, int, int, int] | None = None


NOT_MIXED = Mix()


def draw_mix(mixup: CfgNode, height: int, width: int, seed: int) -> Mix:
    """The mix of a batch of clips of this size, as the config's node MIXUP says."""
    rng = np.random.default_rng(seed)
    if not mixup.ENABLE or rng.random() >= mixup.PROB:
        return NOT_MIXED
    cuts = rng.random() < mixup.SWITCH_PROB if mixup.ALPHA else True
    if cuts and mixup.CUTMIX_ALPHA:
        return _draw_cut(rng.beta(mixup.CUTMIX_ALPHA, mixup.CUTMIX_ALPHA), height, width, rng)
    return Mix(float(rng.beta(mixup.ALPHA, mixup.ALPHA)))


def _draw_cut(own: float, height: int, width: int, rng: np.random.Generator) -> Mix:
    """A rectangle about a random place, with the frame's aspect; what is outside is cut off."""
    side = math.sqrt(1 - own)
    rows, columns = round(height * side), round(width * side)
    top, left = int(rng.integers(height)) - rows // 2, int(rng.integers(width)) - columns // 2
    bottom, right = min(top + rows, height), min(left + columns, width)
    top, left = max(top, 0), max(left, 0)
    # The part that is left, which is more than was drawn where the frame has cut something off.
    own = 1 - (bottom - top) * (right - left) / (height * width)
    return Mix(own, (top, bottom, left, right))


def mix_clips(clips: Tensor, mix: Mix) -> Tensor:
    """Clips [B, ..., H, W], each mixed with its partner."""
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
    """The cross-entropy to the mixed labels."""
    loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    if mix.own == 1:
        return loss
    others = functional.cross_entropy(logits, labels.flip(0), label_smoothing=smoothing)
    return mix.own * loss + (1 - mix.own) * others


def main_labels(labels: Tensor, mix: Mix) -> Tensor:
    """The label that has the larger part of each clip."""
    return labels if mix.own >= 0.5 else labels.flip(0)
