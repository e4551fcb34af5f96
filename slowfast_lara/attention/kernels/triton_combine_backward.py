"""The gradients of the estimate from what the samples saw (triton_mix.py), in Triton.

    dz_ncf = p_ncf (dp_ncf - delta_nf),   dp_ncf = dout_nf.M_cf,   delta_nf = sum_c p_ncf dp_ncf
    dL_cf = sum_n dz_ncf,   dM_cf = sum_n p_ncf dout_nf
    ds_nc = sum_f dz_ncf,   da_nc = ds_nc / alpha_nc,   t_n = sum_c gain_c da_nc
    dr_nc = gain_c da_nc - share_c t_n

    e_nc = r_nc (dr_nc - R_c),   R_c = sum_n r_nc dr_nc: the gradient of q_n.q~_c

`mix_backward_queries` owns queries as the forward pass does. It writes dq, in `rows`
[B,h,N,3F+2] for each frame the largest s + L, the largest p and delta, then mean and t, and in
`parts` [B,h,blocks of queries,C] its share of -R; their sum over the blocks is what the others
are given. R_c is not known yet here, so dq is in float32 until its term is added.

With `rows`, `mix_backward_samples` and `mix_backward_means` need no samples but their own. They
own some samples (of a group of frames), go through all queries, and no sum has two owners.

Pointers: q [B,h,N,d] and grad [B,F,N,h,d] with the strides given; all else is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_combine import SMALLEST, favour_of, scores_of
from slowfast_lara.attention.kernels.triton_shared import gradient_product, in_two, product_of_parts


@triton.jit
def mix_backward_queries(
    q_ptr,
    w_ptr,
    log_sums_ptr,
    means_ptr,
    landmarks_ptr,
    column_sums_ptr,
    base_ptr,
    gain_ptr,
    share_ptr,
    grad_ptr,
    grad_q_ptr,
    rows_ptr,
    parts_ptr,
    q_batch,
    q_head,
    q_token,
    grad_batch,
    grad_frame,
    grad_token,
    grad_head,
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
    rows = rows_ptr + (bh * N + token) * (3 * F + 2)
    if FAVOURED:
        base = tl.load(base_ptr + at, mask=c_ok, other=0.0)
        gain = tl.load(gain_ptr + at, mask=c_ok, other=0.0)
        vectors, sums, shares = landmarks_ptr + at * D, column_sums_ptr + at, share_ptr + at
        favour, mean = favour_of(
            q_rows, n_ok, vectors, c_ok, sums, shares, scale, D, STEP, PRECISION
        )
        alpha = base[None, :] + gain[None, :] * (favour - mean[:, None])
        scores += tl.log(tl.maximum(alpha, SMALLEST))
        tl.store(rows + 3 * F, mean, mask=n_ok)
    scores = tl.where(c_ok[None, :], scores, float("-inf"))
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    grad_scores = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for f in range(F):
        log_sums = tl.load(log_sums_ptr + (bh * F + f) * C + c, mask=c_ok, other=0.0)
        means = tl.load(
            means_ptr + ((bh * F + f) * C + c[:, None]) * D + x[None, :], mask=cx_ok, other=0.0
        )
        grad_cells = b * grad_batch + tl.cast(f, tl.int64) * grad_frame + h * grad_head
        grad = tl.load(
            grad_ptr + grad_cells + token[:, None] * grad_token + x[None, :], mask=nx_ok, other=0.0
        )
        logits = scores + log_sums[None, :]
        top = tl.max(logits, 1)
        weights = tl.exp(logits - top[:, None])
        total = tl.sum(weights, 1)
        weights = weights / total[:, None]
        grad_weights = tl.dot(grad, tl.trans(means), input_precision=PRECISION)
        delta = tl.sum(weights * grad_weights, 1)
        grad_logits = weights * (grad_weights - delta[:, None])
        grad_logits = tl.where(n_ok[:, None], grad_logits, 0.0)
        grad_scores += grad_logits
        tl.store(rows + 3 * f, top, mask=n_ok)
        tl.store(rows + 3 * f + 1, 1 / total, mask=n_ok)
        tl.store(rows + 3 * f + 2, delta, mask=n_ok)
    if FAVOURED:
        alpha = base[None, :] + gain[None, :] * (favour - mean[:, None])
        free = alpha > SMALLEST
        slope = tl.where(free, gain[None, :] * grad_scores / tl.maximum(alpha, SMALLEST), 0.0)
        tilt = tl.sum(slope, 1)
        share = tl.load(share_ptr + at, mask=c_ok, other=0.0)
        slope = favour * (slope - share[None, :] * tilt[:, None])
        tl.store(rows + 3 * F + 1, tilt, mask=n_ok)
        tl.store(parts_ptr + pid.to(tl.int64) * C + c, -tl.sum(slope, 0), mask=c_ok)
    for start in tl.range(0, D, STEP, num_stages=1):
        y = start + tl.arange(0, STEP)
        cy_ok = c_ok[:, None] & (y < D)[None, :]
        cells = at[:, None] * D + y[None, :]
        w = tl.load(w_ptr + cells, mask=cy_ok, other=0.0) * scale
        grad_q = gradient_product(grad_scores, w.to(dtype), False, PRECISION)
        if FAVOURED:
            landmarks = tl.load(landmarks_ptr + cells, mask=cy_ok, other=0.0) * scale
            grad_q += gradient_product(slope, landmarks.to(dtype), True, PRECISION)
        ny_ok = n_ok[:, None] & (y < D)[None, :]
        grad_q_cells = (bh * N + token[:, None]) * D + y[None, :]
        tl.store(grad_q_ptr + grad_q_cells, grad_q.to(grad_q_ptr.dtype.element_ty), mask=ny_ok)


@triton.jit
def favour_of_queries(q, n_ok, high, low, column_sums, PRECISION: tl.constexpr):
    """r_nc as [C,N], of landmarks in two parts."""
    logits = product_of_parts(high, low, tl.trans(q), PRECISION)
    # A query that is not there must not add to the sums over queries.
    logits = tl.where(n_ok[None, :], logits, float("-inf"))
    return tl.exp(logits - column_sums[:, None])


@triton.jit
def weights_of(logits, rows, ok):
    """p_ncf as [C,N], from the numbers of `rows`.

    Large logits that are made anew differ by their rounding. A weight well above a half is the
    largest of its query, which is known: so it needs no logit, and is 1 where it should be.
    """
    top = tl.load(rows, mask=ok, other=float("inf"))[None, :]
    largest = tl.load(rows + 1, mask=ok, other=0.0)[None, :]
    weights = tl.exp(logits - top) * largest
    return tl.where(weights > 0.6, largest, weights)


@triton.jit
def mix_backward_samples(
    q_ptr,
    w_ptr,
    log_sums_ptr,
    means_ptr,
    landmarks_ptr,
    column_sums_ptr,
    base_ptr,
    gain_ptr,
    share_ptr,
    grad_ptr,
    rows_ptr,
    pull_ptr,
    grad_w_ptr,
    grad_log_sums_ptr,
    grad_landmarks_ptr,
    grad_numbers_ptr,
    q_batch,
    q_head,
    q_token,
    grad_batch,
    grad_frame,
    grad_token,
    grad_head,
    scale,
    H,
    N,
    F,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    FAVOURED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`pull` [B,h,C] is -R_c; `grad_numbers` [B,h,3,C] are of base, gain and share."""
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    x, local = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    c_ok, x_ok = c < C, x < D
    cx_ok = c_ok[:, None] & x_ok[None, :]
    at = bh * C + c
    cells = at[:, None] * D + x[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    high, low = in_two(tl.load(w_ptr + cells, mask=cx_ok, other=0.0) * scale, dtype)
    grad_w = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    frames = tl.arange(0, BLOCK_F)[None, :]
    grad_log_sums = tl.zeros([BLOCK_C, BLOCK_F], tl.float32)
    if FAVOURED:
        landmarks = tl.load(landmarks_ptr + cells, mask=cx_ok, other=0.0)
        landmarks_high, landmarks_low = in_two(landmarks * scale, dtype)
        column_sums = tl.load(column_sums_ptr + at, mask=c_ok, other=float("inf"))
        base = tl.load(base_ptr + at, mask=c_ok, other=0.0)[:, None]
        gain = tl.load(gain_ptr + at, mask=c_ok, other=0.0)[:, None]
        share = tl.load(share_ptr + at, mask=c_ok, other=0.0)[:, None]
        pull = tl.load(pull_ptr + at, mask=c_ok, other=0.0)[:, None]
        grad_base = tl.zeros([BLOCK_C], tl.float32)
        grad_gain = tl.zeros([BLOCK_C], tl.float32)
        grad_share = tl.zeros([BLOCK_C], tl.float32)
        grad_landmarks = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    width = 3 * F + 2
    for start in range(0, N, BLOCK_N):
        n = start + local
        n_ok = n < N
        nx_ok = n_ok[:, None] & x_ok[None, :]
        first = tl.cast(start, tl.int64)
        rows = rows_ptr + (bh * N + first) * width + local * width
        q_block = q_ptr + b * q_batch + h * q_head + first * q_token
        q = tl.load(q_block + local[:, None] * q_token + x[None, :], mask=nx_ok, other=0.0)
        scores = product_of_parts(high, low, tl.trans(q), PRECISION)  # [C,N] here
        if FAVOURED:
            favour = favour_of_queries(
                q, n_ok, landmarks_high, landmarks_low, column_sums, PRECISION
            )
            mean = tl.load(rows + 3 * F, mask=n_ok, other=0.0)
            more = favour - mean[None, :]
            alpha = base + gain * more
            scores += tl.log(tl.maximum(alpha, SMALLEST))
        grad_scores = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
        grad_block = grad_ptr + b * grad_batch + h * grad_head + first * grad_token
        for f in range(F):
            seen = (bh * F + f) * C + c
            log_sums = tl.load(log_sums_ptr + seen, mask=c_ok, other=float("-inf"))
            means = tl.load(means_ptr + seen[:, None] * D + x[None, :], mask=cx_ok, other=0.0)
            frame = tl.cast(f, tl.int64) * grad_frame
            grad = tl.load(
                grad_block + frame + local[:, None] * grad_token + x[None, :], mask=nx_ok, other=0.0
            )
            weights = weights_of(scores + log_sums[:, None], rows + 3 * f, n_ok)
            delta = tl.load(rows + 3 * f + 2, mask=n_ok, other=0.0)
            grad_weights = tl.dot(means, tl.trans(grad), input_precision=PRECISION)
            grad_logits = weights * (grad_weights - delta[None, :])
            # Where one sample has all the weight, the difference is of rounding alone.
            grad_logits = tl.where(weights == 1, 0.0, grad_logits)
            grad_scores += grad_logits
            of_frame = tl.sum(grad_logits, 1)
            grad_log_sums += tl.where(frames == f, of_frame[:, None], 0.0)
        grad_w += gradient_product(grad_scores, q, False, PRECISION)
        if FAVOURED:
            grad_alpha = tl.where(alpha > SMALLEST, grad_scores / tl.maximum(alpha, SMALLEST), 0.0)
            tilt = tl.load(rows + 3 * F + 1, mask=n_ok, other=0.0)[None, :]
            grad_favours = favour * (gain * grad_alpha - share * tilt + pull)
            grad_landmarks += gradient_product(grad_favours, q, False, PRECISION)
            grad_base += tl.sum(grad_alpha, 1)
            grad_gain += tl.sum(grad_alpha * more, 1)
            grad_share -= tl.sum(favour * tilt, 1)
    tl.store(grad_w_ptr + cells, grad_w * scale, mask=cx_ok)
    seen_cells = (bh * F + frames) * C + c[:, None]
    tl.store(grad_log_sums_ptr + seen_cells, grad_log_sums, mask=c_ok[:, None] & (frames < F))
    if FAVOURED:
        tl.store(grad_landmarks_ptr + cells, grad_landmarks * scale, mask=cx_ok)
        numbers = grad_numbers_ptr + bh * 3 * C + c
        tl.store(numbers, grad_base, mask=c_ok)
        tl.store(numbers + C, grad_gain, mask=c_ok)
        tl.store(numbers + 2 * C, grad_share, mask=c_ok)


@triton.jit
def mix_backward_means(
    q_ptr,
    w_ptr,
    log_sums_ptr,
    landmarks_ptr,
    column_sums_ptr,
    base_ptr,
    gain_ptr,
    grad_ptr,
    rows_ptr,
    grad_means_ptr,
    q_batch,
    q_head,
    q_token,
    grad_batch,
    grad_frame,
    grad_token,
    grad_head,
    scale,
    H,
    N,
    F,
    C,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAVOURED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dM_cf = sum_n p_ncf dout_nf, for GROUP frames at a time: their scores are the same."""
    blocks, groups = tl.cdiv(C, BLOCK_C), tl.cdiv(F, GROUP)
    pid = tl.program_id(0)
    group = pid // blocks % groups
    bh = (pid // (blocks * groups)).to(tl.int64)
    b, h = bh // H, bh % H
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    x, local = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    c_ok, x_ok = c < C, x < D
    cx_ok = c_ok[:, None] & x_ok[None, :]
    at = bh * C + c
    cells = at[:, None] * D + x[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    high, low = in_two(tl.load(w_ptr + cells, mask=cx_ok, other=0.0) * scale, dtype)
    if FAVOURED:
        landmarks = tl.load(landmarks_ptr + cells, mask=cx_ok, other=0.0)
        landmarks_high, landmarks_low = in_two(landmarks * scale, dtype)
        column_sums = tl.load(column_sums_ptr + at, mask=c_ok, other=float("inf"))
        base = tl.load(base_ptr + at, mask=c_ok, other=0.0)[:, None]
        gain = tl.load(gain_ptr + at, mask=c_ok, other=0.0)[:, None]
    totals = ()
    for _ in tl.static_range(GROUP):
        totals = totals + (tl.zeros([BLOCK_C, BLOCK_D], tl.float32),)  # type: ignore[assignment]
    width = 3 * F + 2
    for start in range(0, N, BLOCK_N):
        n = start + local
        n_ok = n < N
        nx_ok = n_ok[:, None] & x_ok[None, :]
        first = tl.cast(start, tl.int64)
        rows = rows_ptr + (bh * N + first) * width + local * width
        q_block = q_ptr + b * q_batch + h * q_head + first * q_token
        q = tl.load(q_block + local[:, None] * q_token + x[None, :], mask=nx_ok, other=0.0)
        scores = product_of_parts(high, low, tl.trans(q), PRECISION)  # [C,N] here
        if FAVOURED:
            favour = favour_of_queries(
                q, n_ok, landmarks_high, landmarks_low, column_sums, PRECISION
            )
            mean = tl.load(rows + 3 * F, mask=n_ok, other=0.0)
            alpha = base + gain * (favour - mean[None, :])
            scores += tl.log(tl.maximum(alpha, SMALLEST))
        grad_block = grad_ptr + b * grad_batch + h * grad_head + first * grad_token
        frames = rows + 3 * group * GROUP
        new = ()
        for i in tl.static_range(GROUP):
            f = group * GROUP + i
            log_sums = tl.load(
                log_sums_ptr + (bh * F + f) * C + c, mask=c_ok & (f < F), other=float("-inf")
            )
            grad = tl.load(
                grad_block + f.to(tl.int64) * grad_frame + local[:, None] * grad_token + x[None, :],
                mask=nx_ok & (f < F),
                other=0.0,
            )
            weights = weights_of(scores + log_sums[:, None], frames + 3 * i, n_ok & (f < F))
            total = tl.dot(weights.to(dtype), grad, acc=totals[i], input_precision=PRECISION)
            new = new + (total,)  # type: ignore[assignment]
        totals = new
    for i in tl.static_range(GROUP):
        f = group * GROUP + i
        seen_cells = ((bh * F + f) * C + c[:, None]) * D + x[None, :]
        tl.store(grad_means_ptr + seen_cells, totals[i].to(dtype), mask=cx_ok & (f < F))
