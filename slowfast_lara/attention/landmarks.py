"""Landmarks: one vector per segment of the tokens, in float32 for half-precision input."""

from __future__ import annotations

import torch
from torch import Tensor

from slowfast_lara.attention.tensors import gather_tokens, is_exporting, split_frames

# Both tokens of a segment of two are equally far from their mean. Moving the reference towards
# the mean of all tokens breaks the tie, so that rounding does not decide.
GLOBAL_MEAN_SHARE = 0.125


def segment_means(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """[B,h,F*P,d] frame-major -> [B,h,C,d], the means of C segments."""
    means = [_mean(part) for part in _segments(x, num_landmarks, num_frames)]
    return means[0] if len(means) == 1 else torch.cat(means, dim=2)


def farthest_tokens(x: Tensor, num_landmarks: int, *, num_frames: int = 1) -> Tensor:
    """[B,h,F*P,d] frame-major -> [B,h,C,d], the token of each segment farthest from its mean.

    The mean of a spatial position over time is mostly background. Anything that moves through
    the position covers few tokens of the segment, and they are the farthest from that mean.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = _segments(x, num_landmarks, num_frames)
    sums = [part.detach().sum(3, dtype=wide) for part in parts]
    mean = torch.cat(sums, dim=2).sum(2)[:, :, None, None] / x.shape[2]
    chosen = []
    for part, total in zip(parts, sums):
        reference = (total / part.shape[3]).unsqueeze(3).lerp(mean, GLOBAL_MEAN_SHARE)
        # In float32, as in the Triton kernel: rounded differences could select another token.
        distances = torch.linalg.vector_norm(part.detach() - reference, dim=-1, keepdim=True)
        farthest = distances.argmax(3, keepdim=True)
        chosen.append(gather_tokens(part, farthest).squeeze(3).to(wide))
    return torch.cat(chosen, dim=2)


def _mean(part: Tensor) -> Tensor:
    """[B,h,segments,tokens,d] -> [B,h,segments,d]."""
    wide = torch.promote_types(part.dtype, torch.float32)
    # onnxruntime's MatMulScaleFusion moves a division by a constant into the matmul after it,
    # and then fails to find the divided tensor for other nodes (joint and divided Nyström).
    if is_exporting():
        return part.mean(3, dtype=wide)
    # The gradient of `mean` would be materialised in float32; that of `sum` is expanded.
    return part.sum(3, dtype=wide) / part.shape[3]


def _segments(x: Tensor, num_landmarks: int, num_frames: int) -> list[Tensor]:
    """[B,h,F*P,d] frame-major -> segments [B,h,segments,tokens,d], one tensor per length.

    Tokens are first ordered space-major (all frames of a position together), so that a segment
    follows one position through time. If C does not divide the number of tokens, the later
    segments have one token more.
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
