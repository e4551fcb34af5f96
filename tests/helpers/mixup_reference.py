"""Mixup and CutMix pixel by pixel."""

from __future__ import annotations

from typing import Any

import numpy as np


def reference_clips(clips: np.ndarray, mix: Any) -> np.ndarray:
    """Mix clips [B,C,T,H,W] by loops over clips and pixels."""
    out = np.empty(clips.shape)
    batch, _, _, height, width = clips.shape
    for i in range(batch):
        for y in range(height):
            for x in range(width):
                own, other = clips[i, :, :, y, x], clips[batch - 1 - i, :, :, y, x]
                if mix.cut is None:
                    out[i, :, :, y, x] = mix.own * own + (1 - mix.own) * other
                else:
                    top, bottom, left, right = mix.cut
                    inside = top <= y < bottom and left <= x < right
                    out[i, :, :, y, x] = other if inside else own
    return out
