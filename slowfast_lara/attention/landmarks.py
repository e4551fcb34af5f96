"""Landmarks: one vector per segment of tokens, in float32 if the tokens are half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from slowfast_lara.attention.tensors import gather_tokens, is_exporting, split_frames

# `farthest_tokens` measures distances from the segment's mean, moved by this fraction of the way
# towards the mean of all tokens. In a segment of two tokens, both are equally far from their mean:
# without the move, rounding errors would decide which one is selected.
GLOBAL_MEAN_SHARE = 0.125


def segment_means(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """The means of C segments of frame-major tokens: [B,h,F*P,d] -> [B,h,C,d]."""
    means = [_mean(part) for part in _segments(x, num_landmarks, num_frames)]
    return means[0] if len(means) == 1 else torch.cat(means, dim=2)


def farthest_tokens(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """The token of each segment farthest from a reference: [B,h,F*P,d] frame-major -> [B,h,C,d].

    The reference is the segment's mean, moved slightly (GLOBAL_MEAN_SHARE). A segment covers few
    spatial positions over time, so its mean is mostly background. An object that moves through
    these positions covers few of the tokens, and these are the farthest from the mean.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = _segments(x, num_landmarks, num_frames)
    sums = [part.detach().sum(3, dtype=wide) for part in parts]
    mean = torch.cat(sums, dim=2).sum(2)[:, :, None, None] / x.shape[2]
    chosen = []
    for part, total in zip(parts, sums):
        reference = (total / part.shape[3]).unsqueeze(3).lerp(mean, GLOBAL_MEAN_SHARE)
        # Distances are at least float32: rounding to half precision could change the choice.
        distances = torch.linalg.vector_norm(part.detach() - reference, dim=-1, keepdim=True)
        farthest = distances.argmax(3, keepdim=True)
        chosen.append(gather_tokens(part, farthest).squeeze(3).to(wide))
    return torch.cat(chosen, dim=2)


def _mean(part: Tensor) -> Tensor:
    """Mean over the tokens of each segment: [B,h,segments,tokens,d] -> [B,h,segments,d]."""
    wide = torch.promote_types(part.dtype, torch.float32)
    # onnxruntime's MatMulScaleFusion moves a division by a constant into the following matmul.
    # This fails if other nodes also read the divided tensor (joint and divided Nyström).
    if is_exporting():
        return part.mean(3, dtype=wide)
    # The backward pass of `mean` allocates a float32 tensor; that of `sum` returns a view.
    return part.sum(3, dtype=wide) / part.shape[3]


def _segments(x: Tensor, num_landmarks: int, num_frames: int) -> list[Tensor]:
    """Split frame-major tokens [B,h,F*P,d] into segments.

    The tokens are first ordered space-major (all frames of one position are adjacent), so that a
    segment covers few positions over time. If C does not divide the number of tokens, the later
    segments have one token more. The result has one tensor [B,h,segments,tokens,d] per length.
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
        raise ValueError(
            f"expected 1 to {tokens} landmarks for {tokens} tokens, got {num_landmarks}"
        )
