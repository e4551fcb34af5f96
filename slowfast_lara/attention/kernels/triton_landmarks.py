"""Kernels of `landmarks`: one program per segment of the tokens.

A segment is a range of tokens in space-major order (all frames of one position are adjacent). The
first SHORT segments have LENGTH tokens, the other segments LENGTH + 1. x [B,h,F*P,d] is
frame-major and only needs a last stride of 1; all other tensors are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment(pid, C, SHORT, LENGTH):
    """Flat index bh, first token and number of tokens of a program's segment."""
    c = pid % C
    return (pid // C).to(tl.int64), c * LENGTH + tl.maximum(c - SHORT, 0), LENGTH + (c >= SHORT)


@triton.jit
def frame_major(n, F, P):
    """Frame-major index of a space-major token."""
    return (n % F * P + n // F).to(tl.int64)


@triton.jit
def segment_sums(
    x_ptr, out_ptr, x_stride_b, x_stride_h, x_stride_n, H, F, P, C, SHORT, LENGTH,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Sum of each segment's tokens, or their mean if MEANS."""
    pid = tl.program_id(0)
    bh, first, number = segment(pid, C, SHORT, LENGTH)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    p_x = x_ptr + bh // H * x_stride_b + bh % H * x_stride_h
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, number, BLOCK_N):
        mask = (start + i < number)[:, None] & (d < D)[None, :]
        p_rows = p_x + frame_major(first + start + i, F, P) * x_stride_n
        b_x = tl.load(p_rows[:, None] + d[None, :], mask=mask, other=0.0)
        total += tl.sum(b_x.to(tl.float32), 0)
    if MEANS:
        total = total / number
    tl.store(out_ptr + pid.to(tl.int64) * D + d, total, mask=d < D)


@triton.jit
def farthest_of_segment(
    x_ptr, sums_ptr, mean_sums_ptr, out_ptr, chosen_ptr,
    x_stride_b, x_stride_h, x_stride_n, global_share, H, F, P, C, SHORT, LENGTH,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The token of each segment that is farthest from the segment's reference point.

    The reference is the segment's mean, moved by the fraction `global_share` of the way towards the
    mean of all tokens. `mean_sums` [B,h,d] is the mean of `sums` over all segments.
    """
    pid = tl.program_id(0)
    bh, first, number = segment(pid, C, SHORT, LENGTH)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    cd = pid.to(tl.int64) * D + d
    mean = tl.load(sums_ptr + cd, mask=d < D, other=0.0) / number
    global_mean = tl.load(mean_sums_ptr + bh * D + d, mask=d < D, other=0.0) * C / (F * P)
    reference = mean + global_share * (global_mean - mean)
    p_x = x_ptr + bh // H * x_stride_b + bh % H * x_stride_h
    farthest = tl.cast(-1.0, tl.float32)
    chosen = first
    for start in range(0, number, BLOCK_N):
        mask_n = start + i < number
        p_rows = p_x + frame_major(first + start + i, F, P) * x_stride_n
        mask = mask_n[:, None] & (d < D)[None, :]
        b_x = tl.load(p_rows[:, None] + d[None, :], mask=mask, other=0.0)
        offset = tl.where(mask, b_x.to(tl.float32) - reference[None, :], 0.0)
        distances = tl.where(mask_n, tl.sum(offset * offset, 1), -1.0)
        largest = tl.max(distances, 0)
        candidate = first + start + tl.argmax(distances, 0)
        chosen = tl.where(largest > farthest, candidate, chosen)
        farthest = tl.maximum(largest, farthest)
    b_out = tl.load(p_x + frame_major(chosen, F, P) * x_stride_n + d, mask=d < D, other=0.0)
    tl.store(out_ptr + cd, b_out.to(tl.float32), mask=d < D)
    tl.store(chosen_ptr + pid, chosen)


@triton.jit
def segment_backward(
    grad_ptr, chosen_ptr, out_ptr, F, P, C, SHORT, LENGTH,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Gradient of x. Without MEANS, only the chosen token of a segment has a nonzero gradient."""
    pid = tl.program_id(0)
    bh, first, number = segment(pid, C, SHORT, LENGTH)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    grad = tl.load(grad_ptr + pid.to(tl.int64) * D + d, mask=d < D, other=0.0)
    p_out = out_ptr + bh * F * P * D
    if MEANS:
        grad = grad / number
    else:
        chosen = tl.load(chosen_ptr + pid)
    for start in range(0, number, BLOCK_N):
        n = first + start + i
        mask = (start + i < number)[:, None] & (d < D)[None, :]
        if MEANS:
            b_out = tl.broadcast_to(grad[None, :], (BLOCK_N, BLOCK_D))
        else:
            b_out = tl.where((n == chosen)[:, None], grad[None, :], 0.0)
        p_rows = p_out + frame_major(n, F, P) * D
        tl.store(p_rows[:, None] + d[None, :], b_out.to(out_ptr.dtype.element_ty), mask=mask)
