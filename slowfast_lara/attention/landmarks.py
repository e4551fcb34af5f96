"""Landmarks: a few tokens that stand for all, as means of segments."""

from __future__ import annotations

import torch
from torch import Tensor

from slowfast_lara.attention.frames import split_frames


def segment_means(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """[B,h,F*P,d] frame-major -> [B,h,C,d], means of C consecutive segments.

    Tokens are ordered space-major first, all frames of a position together, so
    that a segment follows one place through time. Where C does not divide the
    number of tokens, the later segments have one token more. Means of half precision
    are float32.
    """
    tokens, wide = x.shape[2], torch.promote_types(x.dtype, torch.float32)
    check_landmarks(num_landmarks, tokens)
    space_major = split_frames(x, num_frames).transpose(2, 3).flatten(2, 3)
    length = tokens // num_landmarks
    short = (length + 1) * num_landmarks - tokens
    head, tail = space_major.split((short * length, tokens - short * length), dim=2)
    # Sums, since the gradient of a mean is written out in float32.
    means = head.unflatten(2, (short, length)).sum(3, dtype=wide) / length
    if short == num_landmarks:
        return means
    longer = tail.unflatten(2, (num_landmarks - short, length + 1)).sum(3, dtype=wide)
    return torch.cat((means, longer / (length + 1)), dim=2)


def check_landmarks(num_landmarks: int, tokens: int) -> None:
    if not 1 <= num_landmarks <= tokens:
        raise ValueError(f"{num_landmarks} landmarks of {tokens} tokens; 1 to {tokens} are allowed")
