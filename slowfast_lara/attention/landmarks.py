"""Landmarks: a few tokens that stand for all, one for each segment of the tokens.

Those of half precision are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slowfast_lara.attention.exporting import is_exporting
from slowfast_lara.attention.frames import split_frames
from slowfast_lara.attention.sampling import take_tokens

# Of two tokens, both are as far from their mean: the reference is moved a little towards the mean
# of all tokens, so that the choice is not left to rounding.
TOWARDS_ALL = 0.125


def segment_means(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """[B,h,F*P,d] frame-major -> [B,h,C,d], the means of C segments."""
    means = [_mean(part) for part in _segments(x, num_landmarks, num_frames)]
    return means[0] if len(means) == 1 else torch.cat(means, dim=2)


def farthest_tokens(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """[B,h,F*P,d] frame-major -> [B,h,C,d], of C segments the token farthest from the mean.

    The mean of one place through time is that of its background: what passes through, a few
    tokens of a segment, is averaged away. It is what lies farthest from the mean.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = _segments(x, num_landmarks, num_frames)
    sums = [part.detach().sum(3, dtype=wide) for part in parts]
    mean = torch.cat(sums, dim=2).sum(2)[:, :, None, None] / x.shape[2]
    chosen = []
    for part, total in zip(parts, sums):
        reference = (total / part.shape[3]).unsqueeze(3).lerp(mean, TOWARDS_ALL)
        # In float32, as the kernel: rounded differences would choose another token.
        distances = torch.linalg.vector_norm(part.detach() - reference, dim=-1, keepdim=True)
        farthest = distances.argmax(3, keepdim=True)
        chosen.append(take_tokens(part, farthest).squeeze(3).to(wide))
    return torch.cat(chosen, dim=2)


def _mean(part: Tensor) -> Tensor:
    """[B,h,segments,tokens,d] -> [B,h,segments,d]."""
    wide = torch.promote_types(part.dtype, torch.float32)
    # onnxruntime folds a division by a number into the product that follows it, and then does
    # not find it for others (MatMulScaleFusion, in joint and divided Nyström attention).
    if is_exporting():
        return part.mean(3, dtype=wide)
    # A sum, since the gradient of a mean is written out in float32.
    return part.sum(3, dtype=wide) / part.shape[3]


def _segments(x: Tensor, num_landmarks: int, num_frames: int) -> list[Tensor]:
    """[B,h,F*P,d] frame-major -> C segments as [B,h,segments,tokens,d]; those of a length together.

    Tokens are ordered space-major first, all frames of a position together, so
    that a segment follows one place through time. Where C does not divide the
    number of tokens, the later segments have one token more.
    """
    tokens = x.shape[2]
    check_landmarks(num_landmarks, tokens)
    space_major = split_frames(x, num_frames).transpose(2, 3).flatten(2, 3)
    length = tokens // num_landmarks
    short = (length + 1) * num_landmarks - tokens
    head, tail = space_major.split((short * length, tokens - short * length), dim=2)
    parts = [head.unflatten(2, (short, length))]
    if short < num_landmarks:
        parts.append(tail.unflatten(2, (num_landmarks - short, length + 1)))
    return parts


def check_landmarks(num_landmarks: int, tokens: int) -> None:
    if not 1 <= num_landmarks <= tokens:
        raise ValueError(f"{num_landmarks} landmarks of {tokens} tokens; 1 to {tokens} are allowed")
