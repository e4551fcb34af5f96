"""The estimate from what the samples saw (importance.py), in Triton.

    out_nf = sum_c p_ncf M_cf,   p_ncf = softmax_c(s_nc + L_cf),   s_nc = q_n.w_c + log alpha_nc

FAVOURED: alpha is not the same for all queries. With r_nc = exp(q_n.q~_c - column sum of c),
how much landmark c favours query n, and three numbers for each landmark,

    alpha_nc = base_c + gain_c (r_nc - mean_n),   mean_n = sum_c share_c r_nc,

clamped at SMALLEST: LARA's decoupled and coupled weightings are both of this form.

Forward, a program owns some queries, makes their scores against all samples once, in
registers, and goes through the frames. Nothing of shape [N,C] is in memory.

Pointers: q [B,h,N,d] with the strides given; all else is contiguous, out [B,F,N,h,d] included.
`scale` is d**-0.25.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import in_two, product

SMALLEST = tl.constexpr(1e-8)


@triton.jit
def scores_of(
    q_rows, n_ok, w_rows, c_ok, scale, D: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr
):
    """q_n.w_c [N,C] from pointers to their rows, STEP of the d numbers at a time."""
    total = tl.zeros([q_rows.shape[0], w_rows.shape[0]], tl.float32)
    for start in tl.range(0, D, STEP, num_stages=1):
        x = start + tl.arange(0, STEP)
        x_ok = x < D
        q = tl.load(q_rows[:, None] + x[None, :], mask=n_ok[:, None] & x_ok[None, :], other=0.0)
        w = tl.load(w_rows[:, None] + x[None, :], mask=c_ok[:, None] & x_ok[None, :], other=0.0)
        high, low = in_two(w * scale, q.dtype)
        total += product(q, tl.trans(high), tl.trans(low), PRECISION)
    return total


@triton.jit
def favour_of(
    q_rows,
    n_ok,
    rows,
    c_ok,
    sums_ptr,
    share_ptr,
    scale,
    D: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """r_nc [N,C] of landmarks, from pointers to their rows, and mean_n."""
    logits = scores_of(q_rows, n_ok, rows, c_ok, scale, D, STEP, PRECISION)
    logits = tl.where(n_ok[:, None], logits, float("-inf"))
    column_sums = tl.load(sums_ptr, mask=c_ok, other=float("inf"))
    share = tl.load(share_ptr, mask=c_ok, other=0.0)
    favour = tl.exp(logits - column_sums[None, :])
    return favour, tl.sum(share[None, :] * favour, 1)


@triton.jit
def mix_forward(
    q_ptr,
    w_ptr,
    log_sums_ptr,
    means_ptr,
    landmarks_ptr,
    column_sums_ptr,
    base_ptr,
    gain_ptr,
    share_ptr,
    out_ptr,
    q_batch,
    q_head,
    q_token,
    scale,
    H,
    N,
    F,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    FAVOURED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    token = n.to(tl.int64)
    c, x = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    n_ok, c_ok, x_ok = n < N, c < C, x < D
    nx_ok = n_ok[:, None] & x_ok[None, :]
    cx_ok = c_ok[:, None] & x_ok[None, :]
    q_rows = q_ptr + b * q_batch + h * q_head + token * q_token
    at = bh * C + c
    scores = scores_of(q_rows, n_ok, w_ptr + at * D, c_ok, scale, D, STEP, PRECISION)
    if FAVOURED:
        base = tl.load(base_ptr + at, mask=c_ok, other=0.0)
        gain = tl.load(gain_ptr + at, mask=c_ok, other=0.0)
        rows, sums, shares = landmarks_ptr + at * D, column_sums_ptr + at, share_ptr + at
        favour, mean = favour_of(q_rows, n_ok, rows, c_ok, sums, shares, scale, D, STEP, PRECISION)
        alpha = base[None, :] + gain[None, :] * (favour - mean[:, None])
        scores += tl.log(tl.maximum(alpha, SMALLEST))
    scores = tl.where(c_ok[None, :], scores, float("-inf"))
    for f in range(F):
        log_sums = tl.load(log_sums_ptr + (bh * F + f) * C + c, mask=c_ok, other=0.0)
        means = tl.load(
            means_ptr + ((bh * F + f) * C + c[:, None]) * D + x[None, :], mask=cx_ok, other=0.0
        )
        logits = scores + log_sums[None, :]
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        total = tl.sum(weights, 1)
        out = tl.dot(weights.to(means.dtype), means, input_precision=PRECISION) / total[:, None]
        out_cells = (((b * F + f) * N + token[:, None]) * H + h) * D + x[None, :]
        tl.store(out_ptr + out_cells, out.to(out_ptr.dtype.element_ty), mask=nx_ok)
