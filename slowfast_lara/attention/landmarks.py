"""Landmarks: a few tokens that stand for all, as means of segments."""

from __future__ import annotations

import torch
from torch import Tensor

from slowfast_lara.attention.frames import split_frames


def segment_means(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """[B,h,F*P,d] frame-major -> [B,h,C,d], means of C consecutive segments.

    Tokens are ordered space-major first, all frames of a position together, so
    that a segment follows one place through time. Where C does not divide the
    number of tokens, the later segments have one token more. Of half precision, the
    means are float32.
    """
    tokens = x.shape[2]
    check_landmarks(num_landmarks, tokens)
    space_major = split_frames(x, num_frames).transpose(2, 3).flatten(2, 3)
    length, wide = tokens // num_landmarks, torch.promote_types(x.dtype, torch.float32)
    short = (length + 1) * num_landmarks - tokens
    head, tail = space_major.split((short * length, tokens - short * length), dim=2)
    means = head.unflatten(2, (short, length)).mean(3, dtype=wide)
    if short == num_landmarks:
        return means
    longer = tail.unflatten(2, (num_landmarks - short, length + 1)).mean(3, dtype=wide)
    return torch.cat((means, longer), dim=2)


def check_landmarks(num_landmarks: int, tokens: int) -> None:
    if not 1 <= num_landmarks <= tokens:
        raise ValueError(f"{num_landmarks} landmarks of {tokens} tokens; 1 to {tokens} are allowed")
