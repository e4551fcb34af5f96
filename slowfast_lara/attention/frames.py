"""Tokens and frames: checking and reshaping what every estimator is given."""

from __future__ import annotations

from torch import Tensor


def split_frames(x: Tensor, num_frames: int) -> Tensor:
    """[B,h,F*P,d] -> [B,h,F,P,d], frame-major."""
    if num_frames < 1 or x.shape[2] % num_frames:
        raise ValueError(f"{x.shape[2]} tokens cannot be split into {num_frames} equal frames")
    return x.unflatten(2, (num_frames, -1))
