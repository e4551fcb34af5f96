"""Kernels of `combine`: the estimate from the key statistics.

    out_nf = sum_c p_ncf M_cf,   p_ncf = softmax_c(s_nc + L_cf),   s_nc = q_n.w_c + log alpha_nc

Without ALIGNED, alpha_nc is 1. With ALIGNED, for LARA's decoupled and coupled weightings:

    r_nc = exp(q_n.q~_c - log Z_c),   rbar_n = sum_c shares_c r_nc
    alpha_nc = max(balance_c + gain_c (r_nc - rbar_n), MIN_ALPHA)

A program of the forward kernel owns a block of queries. It computes their scores s_nc for all
samples once, keeps them in registers, and loops over the frames. No [N,C] tensor is written to
global memory. In the backward pass, with z_ncf = s_nc + L_cf,

    dz_ncf = p_ncf (dp_ncf - delta_nf),   dp_ncf = dout_nf.M_cf,   delta_nf = sum_c p_ncf dp_ncf
    dL_cf = sum_n dz_ncf,   dM_cf = sum_n p_ncf dout_nf
    ds_nc = sum_f dz_ncf,   dalpha_nc = ds_nc / alpha_nc,   t_n = sum_c gain_c dalpha_nc
    dr_nc = gain_c dalpha_nc - shares_c t_n

and the gradient of q_n.q~_c is e_nc = r_nc (dr_nc - R_c) with R_c = sum_n r_nc dr_nc.

A program of `combine_backward_queries` also owns a block of queries. It writes dq, the query
statistics [B,h,N,3F+2] (max_c z_ncf, max_c p_ncf and delta_nf of each frame, then rbar_n and t_n),
and its part of the sum -R_c, [B,h,blocks,C]. The operator adds up these parts for the other
kernels. If ALIGNED, dq is float32 and lacks the term with R_c; `query_normaliser_backward` adds it.

A program of `combine_backward_samples` owns a block of samples, and loops over a part of PART
queries; the operator adds up the parts. A program of `combine_backward_means` owns a block of
samples of a few frames, and loops over all queries. Both read the sums over all samples from the
query statistics. Each sum has a fixed order, so results are deterministic.

q [B,h,N,d] and dout [B,F,N,h,d] only need a last stride of 1; all other tensors are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import (
    dot_gradient,
    dot_split_left,
    dot_split_right,
    own_block,
    split_float32,
)

MIN_ALPHA = tl.constexpr(1e-8)


@triton.jit
def query_dots(
    p_q, mask_n, p_w, mask_c, scale,
    D: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q_n.w_c [N,C] from row pointers, by matmuls of STEP head components to save registers."""
    total = tl.zeros([p_q.shape[0], p_w.shape[0]], tl.float32)
    for start in tl.range(0, D, STEP, num_stages=1):
        d = start + tl.arange(0, STEP)
        mask_d = d < D
        b_q = tl.load(p_q[:, None] + d[None, :], mask=mask_n[:, None] & mask_d[None, :], other=0.0)
        b_w = tl.load(p_w[:, None] + d[None, :], mask=mask_c[:, None] & mask_d[None, :], other=0.0)
        hi, lo = split_float32(b_w * scale, b_q.dtype)
        total += dot_split_right(b_q, tl.trans(hi), tl.trans(lo), PRECISION)
    return total


@triton.jit
def query_alignment(
    p_q, mask_n, bhc, mask_c, landmarks_ptr, log_z_ptr, shares_ptr, scale,
    D: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """r_nc [N,C] and rbar_n, for the queries at p_q and the landmarks with flat indices bhc."""
    logits = query_dots(p_q, mask_n, landmarks_ptr + bhc * D, mask_c, scale, D, STEP, PRECISION)
    logits = tl.where(mask_n[:, None], logits, float("-inf"))
    b_log_z = tl.load(log_z_ptr + bhc, mask=mask_c, other=float("inf"))
    b_shares = tl.load(shares_ptr + bhc, mask=mask_c, other=0.0)
    b_r = tl.exp(logits - b_log_z[None, :])
    return b_r, tl.sum(b_shares[None, :] * b_r, 1)


@triton.jit
def combine_forward(
    q_ptr, w_ptr, L_ptr, M_ptr, landmarks_ptr, log_z_ptr, balance_ptr, gain_ptr, shares_ptr,
    out_ptr,
    q_stride_b, q_stride_h, q_stride_n, scale, H, N, F, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh, b, h, _, n = own_block(N, 1, H, BLOCK_N)
    mask_n, n = n < N, n.to(tl.int64)
    c, d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    mask_c, mask_d = c < C, d < D
    mask_nd = mask_n[:, None] & mask_d[None, :]
    mask_cd = mask_c[:, None] & mask_d[None, :]
    p_q = q_ptr + b * q_stride_b + h * q_stride_h + n * q_stride_n
    bhc = bh * C + c
    b_s = query_dots(p_q, mask_n, w_ptr + bhc * D, mask_c, scale, D, STEP, PRECISION)
    if ALIGNED:
        b_balance = tl.load(balance_ptr + bhc, mask=mask_c, other=0.0)
        b_gain = tl.load(gain_ptr + bhc, mask=mask_c, other=0.0)
        b_r, b_rbar = query_alignment(
            p_q, mask_n, bhc, mask_c, landmarks_ptr, log_z_ptr, shares_ptr, scale,
            D, STEP, PRECISION,
        )  # fmt: skip
        alpha = b_balance[None, :] + b_gain[None, :] * (b_r - b_rbar[:, None])
        b_s += tl.log(tl.maximum(alpha, MIN_ALPHA))
    b_s = tl.where(mask_c[None, :], b_s, float("-inf"))
    for f in range(F):
        fc = (bh * F + f) * C + c
        b_L = tl.load(L_ptr + fc, mask=mask_c, other=0.0)
        b_M = tl.load(M_ptr + fc[:, None] * D + d[None, :], mask=mask_cd, other=0.0)
        logits = b_s + b_L[None, :]
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        total = tl.sum(weights, 1)
        b_out = tl.dot(weights.to(b_M.dtype), b_M, input_precision=PRECISION) / total[:, None]
        p_out = out_ptr + (((b * F + f) * N + n[:, None]) * H + h) * D + d[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=mask_nd)


@triton.jit
def combine_backward_queries(
    q_ptr, w_ptr, L_ptr, M_ptr, landmarks_ptr, log_z_ptr, balance_ptr, gain_ptr, shares_ptr,
    dout_ptr, dq_ptr, stats_ptr, partial_ptr,
    q_stride_b, q_stride_h, q_stride_n, dout_stride_b, dout_stride_f, dout_stride_n, dout_stride_h,
    scale, H, N, F, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh, b, h, _, n = own_block(N, 1, H, BLOCK_N)
    mask_n, n = n < N, n.to(tl.int64)
    c, d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    mask_c, mask_d = c < C, d < D
    mask_nd = mask_n[:, None] & mask_d[None, :]
    mask_cd = mask_c[:, None] & mask_d[None, :]
    p_q = q_ptr + b * q_stride_b + h * q_stride_h + n * q_stride_n
    bhc = bh * C + c
    b_s = query_dots(p_q, mask_n, w_ptr + bhc * D, mask_c, scale, D, STEP, PRECISION)
    p_stats = stats_ptr + (bh * N + n) * (3 * F + 2)
    if ALIGNED:
        b_balance = tl.load(balance_ptr + bhc, mask=mask_c, other=0.0)
        b_gain = tl.load(gain_ptr + bhc, mask=mask_c, other=0.0)
        b_r, b_rbar = query_alignment(
            p_q, mask_n, bhc, mask_c, landmarks_ptr, log_z_ptr, shares_ptr, scale,
            D, STEP, PRECISION,
        )  # fmt: skip
        alpha = b_balance[None, :] + b_gain[None, :] * (b_r - b_rbar[:, None])
        b_s += tl.log(tl.maximum(alpha, MIN_ALPHA))
        tl.store(p_stats + 3 * F, b_rbar, mask=mask_n)
    b_s = tl.where(mask_c[None, :], b_s, float("-inf"))
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    b_ds = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for f in range(F):
        fc = (bh * F + f) * C + c
        b_L = tl.load(L_ptr + fc, mask=mask_c, other=0.0)
        b_M = tl.load(M_ptr + fc[:, None] * D + d[None, :], mask=mask_cd, other=0.0)
        p_dout = dout_ptr + b * dout_stride_b + tl.cast(f, tl.int64) * dout_stride_f
        p_dout = p_dout + h * dout_stride_h + n[:, None] * dout_stride_n + d[None, :]
        b_dout = tl.load(p_dout, mask=mask_nd, other=0.0)
        logits = b_s + b_L[None, :]
        top = tl.max(logits, 1)
        weights = tl.exp(logits - top[:, None])
        total = tl.sum(weights, 1)
        weights = weights / total[:, None]
        dweights = tl.dot(b_dout, tl.trans(b_M), input_precision=PRECISION)
        delta = tl.sum(weights * dweights, 1)
        dlogits = weights * (dweights - delta[:, None])
        b_ds += tl.where(mask_n[:, None], dlogits, 0.0)
        tl.store(p_stats + 3 * f, top, mask=mask_n)
        tl.store(p_stats + 3 * f + 1, 1 / total, mask=mask_n)
        tl.store(p_stats + 3 * f + 2, delta, mask=mask_n)
    if ALIGNED:
        alpha = b_balance[None, :] + b_gain[None, :] * (b_r - b_rbar[:, None])
        b_e = b_gain[None, :] * b_ds / tl.maximum(alpha, MIN_ALPHA)
        b_e = tl.where(alpha > MIN_ALPHA, b_e, 0.0)
        b_t = tl.sum(b_e, 1)
        b_shares = tl.load(shares_ptr + bhc, mask=mask_c, other=0.0)
        b_e = b_r * (b_e - b_shares[None, :] * b_t[:, None])  # e_nc without the term with R_c
        tl.store(p_stats + 3 * F + 1, b_t, mask=mask_n)
        p_partial = partial_ptr + tl.program_id(0).to(tl.int64) * C + c
        tl.store(p_partial, -tl.sum(b_e, 0), mask=mask_c)
    for start in tl.range(0, D, STEP, num_stages=1):
        y = start + tl.arange(0, STEP)
        mask_cy = mask_c[:, None] & (y < D)[None, :]
        cy = bhc[:, None] * D + y[None, :]
        b_w = tl.load(w_ptr + cy, mask=mask_cy, other=0.0) * scale
        b_dq = dot_gradient(b_ds, b_w.to(dtype), False, PRECISION)
        if ALIGNED:
            b_landmarks = tl.load(landmarks_ptr + cy, mask=mask_cy, other=0.0) * scale
            b_dq += dot_gradient(b_e, b_landmarks.to(dtype), True, PRECISION)
        p_dq = dq_ptr + (bh * N + n[:, None]) * D + y[None, :]
        mask_ny = mask_n[:, None] & (y < D)[None, :]
        tl.store(p_dq, b_dq.to(dq_ptr.dtype.element_ty), mask=mask_ny)


@triton.jit
def sample_alignment(b_q, mask_n, hi, lo, b_log_z, PRECISION: tl.constexpr):
    """r_nc as [C,N], for landmarks that are split into hi and lo."""
    logits = dot_split_left(hi, lo, tl.trans(b_q), PRECISION)
    # Mask out-of-range queries before summing over them.
    logits = tl.where(mask_n[None, :], logits, float("-inf"))
    return tl.exp(logits - b_log_z[:, None])


@triton.jit
def sample_weights(logits, p_stats, mask):
    """p_ncf of one frame as [C,N], normalised by the query statistics of the frame.

    Rounding makes large logits differ from those of combine_backward_queries. A weight above 0.6
    must be the largest weight of its query, so the maximum in the query statistics replaces it.
    """
    top = tl.load(p_stats, mask=mask, other=float("inf"))[None, :]
    largest = tl.load(p_stats + 1, mask=mask, other=0.0)[None, :]
    weights = tl.exp(logits - top) * largest
    return tl.where(weights > 0.6, largest, weights)


@triton.jit
def combine_backward_samples(
    q_ptr, w_ptr, L_ptr, M_ptr, landmarks_ptr, log_z_ptr, balance_ptr, gain_ptr, shares_ptr,
    dout_ptr, stats_ptr, minus_R_ptr, dw_ptr, dL_ptr, dlandmarks_ptr, dcolumns_ptr,
    q_stride_b, q_stride_h, q_stride_n, dout_stride_b, dout_stride_f, dout_stride_n, dout_stride_h,
    scale, H, N, F, C, PART,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw, dL and dq~; `dcolumns` [B,h,3,C] are the gradients of `balance`, `gain` and `shares`."""
    parts = tl.cdiv(N, PART)
    bh, b, h, part, c = own_block(C, parts, H, BLOCK_C)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_c, mask_d = c < C, d < D
    mask_cd = mask_c[:, None] & mask_d[None, :]
    bhc = bh * C + c
    cd = bhc[:, None] * D + d[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    w_hi, w_lo = split_float32(tl.load(w_ptr + cd, mask=mask_cd, other=0.0) * scale, dtype)
    b_dw = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    frames = tl.arange(0, BLOCK_F)[None, :]
    b_dL = tl.zeros([BLOCK_C, BLOCK_F], tl.float32)
    if ALIGNED:
        b_landmarks = tl.load(landmarks_ptr + cd, mask=mask_cd, other=0.0)
        landmarks_hi, landmarks_lo = split_float32(b_landmarks * scale, dtype)
        b_log_z = tl.load(log_z_ptr + bhc, mask=mask_c, other=float("inf"))
        b_balance = tl.load(balance_ptr + bhc, mask=mask_c, other=0.0)[:, None]
        b_gain = tl.load(gain_ptr + bhc, mask=mask_c, other=0.0)[:, None]
        b_shares = tl.load(shares_ptr + bhc, mask=mask_c, other=0.0)[:, None]
        minus_R = tl.load(minus_R_ptr + bhc, mask=mask_c, other=0.0)[:, None]
        b_dbalance = tl.zeros([BLOCK_C], tl.float32)
        b_dgain = tl.zeros([BLOCK_C], tl.float32)
        b_dshares = tl.zeros([BLOCK_C], tl.float32)
        b_dlandmarks = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    width = 3 * F + 2
    for start in range(part * PART, tl.minimum((part + 1) * PART, N), BLOCK_N):
        mask_n = start + i < N
        mask_nd = mask_n[:, None] & mask_d[None, :]
        first = tl.cast(start, tl.int64)
        p_stats = stats_ptr + (bh * N + first) * width + i * width
        p_q = q_ptr + b * q_stride_b + h * q_stride_h + first * q_stride_n
        b_q = tl.load(p_q + i[:, None] * q_stride_n + d[None, :], mask=mask_nd, other=0.0)
        b_s = dot_split_left(w_hi, w_lo, tl.trans(b_q), PRECISION)  # [C,N]
        if ALIGNED:
            b_r = sample_alignment(b_q, mask_n, landmarks_hi, landmarks_lo, b_log_z, PRECISION)
            b_rbar = tl.load(p_stats + 3 * F, mask=mask_n, other=0.0)
            centred = b_r - b_rbar[None, :]
            alpha = b_balance + b_gain * centred
            b_s += tl.log(tl.maximum(alpha, MIN_ALPHA))
        b_ds = tl.zeros([BLOCK_C, BLOCK_N], tl.float32)
        p_dout = dout_ptr + b * dout_stride_b + h * dout_stride_h + first * dout_stride_n
        for f in range(F):
            fc = (bh * F + f) * C + c
            b_L = tl.load(L_ptr + fc, mask=mask_c, other=float("-inf"))
            b_M = tl.load(M_ptr + fc[:, None] * D + d[None, :], mask=mask_cd, other=0.0)
            p_frame = p_dout + tl.cast(f, tl.int64) * dout_stride_f
            p_frame = p_frame + i[:, None] * dout_stride_n + d[None, :]
            b_dout = tl.load(p_frame, mask=mask_nd, other=0.0)
            weights = sample_weights(b_s + b_L[:, None], p_stats + 3 * f, mask_n)
            delta = tl.load(p_stats + 3 * f + 2, mask=mask_n, other=0.0)
            dweights = tl.dot(b_M, tl.trans(b_dout), input_precision=PRECISION)
            dlogits = weights * (dweights - delta[None, :])
            # If one sample has all the weight, dweights - delta is pure rounding error.
            dlogits = tl.where(weights == 1, 0.0, dlogits)
            b_ds += dlogits
            b_dL += tl.where(frames == f, tl.sum(dlogits, 1)[:, None], 0.0)
        b_dw += dot_gradient(b_ds, b_q, False, PRECISION)
        if ALIGNED:
            dalpha = tl.where(alpha > MIN_ALPHA, b_ds / tl.maximum(alpha, MIN_ALPHA), 0.0)
            b_t = tl.load(p_stats + 3 * F + 1, mask=mask_n, other=0.0)[None, :]
            b_e = b_r * (b_gain * dalpha - b_shares * b_t + minus_R)
            b_dlandmarks += dot_gradient(b_e, b_q, False, PRECISION)
            b_dbalance += tl.sum(dalpha, 1)
            b_dgain += tl.sum(dalpha * centred, 1)
            b_dshares -= tl.sum(b_r * b_t, 1)
    bh = bh * parts + part
    cd = (bh * C + c[:, None]) * D + d[None, :]
    tl.store(dw_ptr + cd, b_dw * scale, mask=mask_cd)
    p_dL = dL_ptr + (bh * F + frames) * C + c[:, None]
    tl.store(p_dL, b_dL, mask=mask_c[:, None] & (frames < F))
    if ALIGNED:
        tl.store(dlandmarks_ptr + cd, b_dlandmarks * scale, mask=mask_cd)
        p_dcolumns = dcolumns_ptr + bh * 3 * C + c
        tl.store(p_dcolumns, b_dbalance, mask=mask_c)
        tl.store(p_dcolumns + C, b_dgain, mask=mask_c)
        tl.store(p_dcolumns + 2 * C, b_dshares, mask=mask_c)


@triton.jit
def combine_backward_means(
    q_ptr, w_ptr, L_ptr, landmarks_ptr, log_z_ptr, balance_ptr, gain_ptr,
    dout_ptr, stats_ptr, dM_ptr,
    q_stride_b, q_stride_h, q_stride_n, dout_stride_b, dout_stride_f, dout_stride_n, dout_stride_h,
    scale, H, N, F, C,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dM_cf = sum_n p_ncf dout_nf for GROUP frames; s_nc is computed once for all of them."""
    bh, b, h, group, c = own_block(C, tl.cdiv(F, GROUP), H, BLOCK_C)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_c, mask_d = c < C, d < D
    mask_cd = mask_c[:, None] & mask_d[None, :]
    bhc = bh * C + c
    cd = bhc[:, None] * D + d[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    w_hi, w_lo = split_float32(tl.load(w_ptr + cd, mask=mask_cd, other=0.0) * scale, dtype)
    if ALIGNED:
        b_landmarks = tl.load(landmarks_ptr + cd, mask=mask_cd, other=0.0)
        landmarks_hi, landmarks_lo = split_float32(b_landmarks * scale, dtype)
        b_log_z = tl.load(log_z_ptr + bhc, mask=mask_c, other=float("inf"))
        b_balance = tl.load(balance_ptr + bhc, mask=mask_c, other=0.0)[:, None]
        b_gain = tl.load(gain_ptr + bhc, mask=mask_c, other=0.0)[:, None]
    totals = ()
    for _ in tl.static_range(GROUP):
        totals = totals + (tl.zeros([BLOCK_C, BLOCK_D], tl.float32),)  # type: ignore[assignment]
    width = 3 * F + 2
    for start in range(0, N, BLOCK_N):
        mask_n = start + i < N
        mask_nd = mask_n[:, None] & mask_d[None, :]
        first = tl.cast(start, tl.int64)
        p_stats = stats_ptr + (bh * N + first) * width + i * width
        p_q = q_ptr + b * q_stride_b + h * q_stride_h + first * q_stride_n
        b_q = tl.load(p_q + i[:, None] * q_stride_n + d[None, :], mask=mask_nd, other=0.0)
        b_s = dot_split_left(w_hi, w_lo, tl.trans(b_q), PRECISION)  # [C,N]
        if ALIGNED:
            b_r = sample_alignment(b_q, mask_n, landmarks_hi, landmarks_lo, b_log_z, PRECISION)
            b_rbar = tl.load(p_stats + 3 * F, mask=mask_n, other=0.0)
            alpha = b_balance + b_gain * (b_r - b_rbar[None, :])
            b_s += tl.log(tl.maximum(alpha, MIN_ALPHA))
        p_dout = dout_ptr + b * dout_stride_b + h * dout_stride_h + first * dout_stride_n
        p_group = p_stats + 3 * group * GROUP
        new = ()
        for j in tl.static_range(GROUP):
            f = group * GROUP + j
            b_L = tl.load(L_ptr + (bh * F + f) * C + c, mask=mask_c & (f < F), other=float("-inf"))
            p_frame = p_dout + f.to(tl.int64) * dout_stride_f
            p_frame = p_frame + i[:, None] * dout_stride_n + d[None, :]
            b_dout = tl.load(p_frame, mask=mask_nd & (f < F), other=0.0)
            weights = sample_weights(b_s + b_L[:, None], p_group + 3 * j, mask_n & (f < F))
            total = tl.dot(weights.to(dtype), b_dout, acc=totals[j], input_precision=PRECISION)
            new = new + (total,)  # type: ignore[assignment]
        totals = new
    for j in tl.static_range(GROUP):
        f = group * GROUP + j
        p_dM = dM_ptr + ((bh * F + f) * C + c[:, None]) * D + d[None, :]
        tl.store(p_dM, totals[j].to(dtype), mask=mask_cd & (f < F))
