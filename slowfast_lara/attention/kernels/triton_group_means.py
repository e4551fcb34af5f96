"""Kernels of the means of groups of keys, for `merged`.

For one frame, with the weights s_p of the keys (`shares`), which sum to 1 in each group, and with
the mean r and variance Var(q) of the queries:

    k_c = sum_p s_p k_p,   v_c = sum_p s_p v_p
    b_c = -sum_p s_p log s_p + Var(q) sum_p s_p |k_p - k_c|^2 / (2d)

`query_moments` sums the queries and their squares in QUERY_PARTS parts, which the other kernels
add up. `choose_groups` (triton_groups.py) calls `write_means`. The second term of b_c has no
gradient. The other gradients, with t_p = dk_c.k_p + dv_c.v_p - db_c log s_p, are

    dlogit_p = s_p (t_p - sum_{p' in c} s_p' t_p'),   dk_p = s_p dk_c + dlogit_p r / sqrt(d)
    dv_p = s_p dv_c,   dr = sum_p dlogit_p k_p / sqrt(d)

where c is the group of p. A program of `group_means_backward` owns a frame, and writes the part of
dr from this frame. q, k and v only need a last stride of 1; all other tensors are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention import groups
from slowfast_lara.attention.kernels import tiles
from slowfast_lara.attention.kernels.triton_shared import dot_split_left, own_block, split_float32

MIN_LOG_WEIGHT = tl.constexpr(groups.MIN_LOG_WEIGHT)
QUERY_PARTS = tl.constexpr(tiles.QUERY_PARTS)


@triton.jit
def query_moments(
    q_ptr, moments_ptr, q_stride_b, q_stride_h, q_stride_n, H, N,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums of q and of q^2 over each part of the queries: [B,h,QUERY_PARTS,2,d]."""
    pid = tl.program_id(0)
    bh = (pid // QUERY_PARTS).to(tl.int64)
    length = tl.cdiv(N, QUERY_PARTS)
    first = pid % QUERY_PARTS * length
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    p_q = q_ptr + bh // H * q_stride_b + bh % H * q_stride_h
    sums = tl.zeros([BLOCK_D], tl.float32)
    squares = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_N):
        n = first + start + i
        mask_n = (start + i < length) & (n < N)
        b_q = load_rows(p_q, q_stride_n, n, mask_n, D, BLOCK_D).to(tl.float32)
        sums += tl.sum(b_q, 0)
        squares += tl.sum(b_q * b_q, 0)
    p_out = moments_ptr + tl.cast(pid, tl.int64) * 2 * D + d
    tl.store(p_out, sums, mask=d < D)
    tl.store(p_out + D, squares, mask=d < D)


@triton.jit
def mean_query(moments_ptr, bh, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mean query r, and the mean square of each component of the queries."""
    d, part = tl.arange(0, BLOCK_D), tl.arange(0, QUERY_PARTS)
    p_moments = moments_ptr + (bh * QUERY_PARTS + part[:, None]) * 2 * D + d[None, :]
    mask = (d < D)[None, :]
    sums = tl.sum(tl.load(p_moments, mask=mask, other=0.0), 0)
    return sums / N, tl.sum(tl.load(p_moments + D, mask=mask, other=0.0), 0) / N


@triton.jit
def load_rows(p_x, stride, rows, mask_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = mask_rows[:, None] & (d < D)[None, :]
    return tl.load(p_x + rows.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def write_means(
    tokens, groups_ptr, shares_ptr, kc_ptr, vc_ptr, biases_ptr, mean_k, variance, first, P, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write k_c, v_c and b_c of a block of groups of a frame."""
    p_k, p_v, k_stride_n, v_stride_n = tokens
    c = first + tl.arange(0, BLOCK_M)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    b_kc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_vc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    entropy = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, P, BLOCK_N):
        p = start + i
        groups = tl.load(groups_ptr + p, mask=p < P, other=-1)
        shares = tl.load(shares_ptr + p, mask=p < P, other=1.0)
        weights = tl.where(groups[None, :] == c[:, None], shares[None, :], 0.0)
        hi, lo = split_float32(weights, p_k.dtype.element_ty)
        b_k = load_rows(p_k, k_stride_n, p, p < P, D, BLOCK_D)
        b_kc += dot_split_left(hi, lo, b_k, PRECISION)
        b_v = load_rows(p_v, v_stride_n, p, p < P, D, BLOCK_D)
        b_vc += dot_split_left(hi, lo, b_v, PRECISION)
        entropy -= tl.sum(weights * tl.log(shares)[None, :], 1)
        # The sum of s_p |k_p - k_c|^2 is computed from centred keys, to avoid cancellation.
        centred = b_k.to(tl.float32) - mean_k[None, :]
        spread += tl.sum(weights * tl.sum(centred * centred, 1)[None, :], 1)
    centred = b_kc - mean_k[None, :]
    spread = tl.maximum(spread - tl.sum(centred * centred, 1), 0.0)
    tl.store(biases_ptr + c, entropy + variance * spread / (2 * D), mask=c < C)
    cd, mask = c[:, None] * D + d[None, :], (c < C)[:, None] & (d < D)[None, :]
    tl.store(kc_ptr + cd, b_kc.to(kc_ptr.dtype.element_ty), mask=mask)
    tl.store(vc_ptr + cd, b_vc.to(vc_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_group_means(
    groups_ptr, shares_ptr, t_ptr, means_ptr, P, C, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    """Write sum_{p in c} s_p t_p of each group c."""
    c, i = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_I)
    means = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, P, BLOCK_I):
        j = start + i
        groups = tl.load(groups_ptr + j, mask=j < P, other=-1)
        t = tl.load(shares_ptr + j, mask=j < P, other=0.0)
        t *= tl.load(t_ptr + j, mask=j < P, other=0.0)
        means += tl.sum(tl.where(groups[None, :] == c[:, None], t[None, :], 0.0), 1)
    tl.store(means_ptr + c, means, mask=c < C)


@triton.jit
def group_means_backward(
    k_ptr, v_ptr, moments_ptr, groups_ptr, shares_ptr, top_ptr, dkc_ptr, dvc_ptr, dbiases_ptr,
    dk_ptr, dv_ptr, dr_ptr, t_ptr, means_ptr,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, scale, H, N, F, P, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    bh, b, h, f, _ = own_block(1, F, H, 1)
    frame = bh * F + f
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    p_k = k_ptr + b * k_stride_b + h * k_stride_h + f.to(tl.int64) * P * k_stride_n
    p_v = v_ptr + b * v_stride_b + h * v_stride_h + f.to(tl.int64) * P * v_stride_n
    p_groups, p_shares, p_t = groups_ptr + frame * P, shares_ptr + frame * P, t_ptr + frame * P
    p_dkc, p_dvc = dkc_ptr + frame * C * D, dvc_ptr + frame * C * D
    r, _ = mean_query(moments_ptr, bh, N, D, BLOCK_D)
    r = r * scale
    top = tl.load(top_ptr + frame)
    for start in range(0, P, BLOCK_N):
        p = start + i
        c = tl.load(p_groups + p, mask=p < P, other=0)
        shares = tl.load(p_shares + p, mask=p < P, other=1.0)
        b_k = load_rows(p_k, k_stride_n, p, p < P, D, BLOCK_D).to(tl.float32)
        t = tl.sum(b_k * load_rows(p_dkc, D, c, p < P, D, BLOCK_D), 1)
        b_v = load_rows(p_v, v_stride_n, p, p < P, D, BLOCK_D).to(tl.float32)
        t += tl.sum(b_v * load_rows(p_dvc, D, c, p < P, D, BLOCK_D), 1)
        t -= tl.load(dbiases_ptr + frame * C + c, mask=p < P, other=0.0) * tl.log(shares)
        tl.store(p_t + p, t, mask=p < P)
    tl.debug_barrier()
    p_means = means_ptr + frame * C
    write_group_means(p_groups, p_shares, p_t, p_means, P, C, BLOCK_C, BLOCK_I)
    tl.debug_barrier()
    dr = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, P, BLOCK_N):
        p = start + i
        c = tl.load(p_groups + p, mask=p < P, other=0)
        shares = tl.load(p_shares + p, mask=p < P, other=0.0)[:, None]
        b_k = load_rows(p_k, k_stride_n, p, p < P, D, BLOCK_D).to(tl.float32)
        # Logits below top + MIN_LOG_WEIGHT are clamped in the forward pass: their gradient is 0.
        varies = tl.sum(b_k * r[None, :], 1) - top >= MIN_LOG_WEIGHT
        dlogits = tl.load(p_t + p, mask=p < P, other=0.0)
        dlogits -= tl.load(p_means + c, mask=p < P, other=0.0)
        dlogits = tl.where(varies, dlogits, 0.0)[:, None] * shares
        dr += tl.sum(dlogits * b_k, 0)
        nd = (frame * P + p)[:, None] * D + d[None, :]
        mask = (p < P)[:, None] & (d < D)[None, :]
        b_dk = shares * load_rows(p_dkc, D, c, p < P, D, BLOCK_D) + dlogits * r[None, :]
        tl.store(dk_ptr + nd, b_dk.to(dk_ptr.dtype.element_ty), mask=mask)
        b_dv = shares * load_rows(p_dvc, D, c, p < P, D, BLOCK_D)
        tl.store(dv_ptr + nd, b_dv.to(dv_ptr.dtype.element_ty), mask=mask)
    tl.store(dr_ptr + frame * D + d, dr * scale, mask=d < D)
