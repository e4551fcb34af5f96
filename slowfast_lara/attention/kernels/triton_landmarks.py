"""Landmarks (landmarks.py) in Triton: a program for each segment of the tokens.

Tokens are counted space-major, all frames of a position together, and segments are cut from
that order: the first SHORT of LENGTH tokens, the others of one more. x [B,h,F*P,d] is
frame-major, with the strides given; all else is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment(pid, C, SHORT, LENGTH):
    """Clip and head, first token and number of tokens of a program's segment."""
    c = pid % C
    return (pid // C).to(tl.int64), c * LENGTH + tl.maximum(c - SHORT, 0), LENGTH + (c >= SHORT)


@triton.jit
def frame_major(token, F, P):
    return (token % F * P + token // F).to(tl.int64)


@triton.jit
def segment_sums(
    x_ptr,
    out_ptr,
    x_batch,
    x_head,
    x_token,
    H,
    F,
    P,
    C,
    SHORT,
    LENGTH,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MEANS: tl.constexpr,
):
    """The sum of each segment's tokens, or their mean."""
    pid = tl.program_id(0)
    bh, first, number = segment(pid, C, SHORT, LENGTH)
    x, local = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    x_clip = x_ptr + bh // H * x_batch + bh % H * x_head
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, number, BLOCK_N):
        ok = (start + local < number)[:, None] & (x < D)[None, :]
        rows = x_clip + frame_major(first + start + local, F, P) * x_token
        tokens = tl.load(rows[:, None] + x[None, :], mask=ok, other=0.0)
        total += tl.sum(tokens.to(tl.float32), 0)
    if MEANS:
        total = total / number
    tl.store(out_ptr + pid.to(tl.int64) * D + x, total, mask=x < D)


@triton.jit
def farthest_of_segment(
    x_ptr,
    sums_ptr,
    mean_sums_ptr,
    out_ptr,
    chosen_ptr,
    x_batch,
    x_head,
    x_token,
    towards_all,
    H,
    F,
    P,
    C,
    SHORT,
    LENGTH,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The first of a segment's tokens that is farthest from its mean, moved `towards_all`.

    `mean_sums` [B,h,d] is the mean of the segments' sums.
    """
    pid = tl.program_id(0)
    bh, first, number = segment(pid, C, SHORT, LENGTH)
    x, local = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    at = pid.to(tl.int64) * D + x
    mean = tl.load(sums_ptr + at, mask=x < D, other=0.0) / number
    mean_of_all = tl.load(mean_sums_ptr + bh * D + x, mask=x < D, other=0.0) * C / (F * P)
    reference = mean + towards_all * (mean_of_all - mean)
    x_clip = x_ptr + bh // H * x_batch + bh % H * x_head
    farthest = tl.cast(-1.0, tl.float32)
    chosen = first
    for start in range(0, number, BLOCK_N):
        there = start + local < number
        rows = x_clip + frame_major(first + start + local, F, P) * x_token
        ok = there[:, None] & (x < D)[None, :]
        tokens = tl.load(rows[:, None] + x[None, :], mask=ok, other=0.0)
        away = tl.where(ok, tokens.to(tl.float32) - reference[None, :], 0.0)
        distances = tl.where(there, tl.sum(away * away, 1), -1.0)
        largest = tl.max(distances, 0)
        place = first + start + tl.argmax(distances, 0)
        chosen = tl.where(largest > farthest, place, chosen)
        farthest = tl.maximum(largest, farthest)
    token = tl.load(x_clip + frame_major(chosen, F, P) * x_token + x, mask=x < D, other=0.0)
    tl.store(out_ptr + at, token.to(tl.float32), mask=x < D)
    tl.store(chosen_ptr + pid, chosen)


@triton.jit
def spread_over_segments(
    grad_ptr,
    chosen_ptr,
    out_ptr,
    F,
    P,
    C,
    SHORT,
    LENGTH,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MEANS: tl.constexpr,
):
    """Backward: a segment's gradient for all of its tokens alike, or for the chosen one."""
    pid = tl.program_id(0)
    bh, first, number = segment(pid, C, SHORT, LENGTH)
    x, local = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    grad = tl.load(grad_ptr + pid.to(tl.int64) * D + x, mask=x < D, other=0.0)
    out_clip = out_ptr + bh * F * P * D
    if MEANS:
        grad = grad / number
    else:
        chosen = tl.load(chosen_ptr + pid)
    for start in range(0, number, BLOCK_N):
        token = first + start + local
        ok = (start + local < number)[:, None] & (x < D)[None, :]
        if MEANS:
            own = tl.broadcast_to(grad[None, :], (BLOCK_N, BLOCK_D))
        else:
            own = tl.where((token == chosen)[:, None], grad[None, :], 0.0)
        rows = out_clip + frame_major(token, F, P) * D
        tl.store(rows[:, None] + x[None, :], own.to(out_ptr.dtype.element_ty), mask=ok)
