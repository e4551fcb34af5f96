"""Forward kernel of `combine`: the estimate from the key statistics.

    out_nf = sum_c p_ncf M_cf,   p_ncf = softmax_c(s_nc + L_cf),   s_nc = q_n.w_c + log alpha_nc

If ALIGNED, alpha differs between queries; LARA's decoupled and coupled weightings have this form:

    r_nc = exp(q_n.q~_c - log Z_c),   rbar_n = sum_c shares_c r_nc
    alpha_nc = max(balance_c + gain_c (r_nc - rbar_n), MIN_ALPHA)

A program owns a block of queries, computes their scores for all samples once, in registers, and
loops over the frames. No tensor of shape [N,C] is in memory.

q [B,h,N,d] has any strides; all other tensors are contiguous, out is [B,F,N,h,d].
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import dot_split_right, split_float32

MIN_ALPHA = tl.constexpr(1e-8)


@triton.jit
def query_dots(
    p_q, mask_n, p_w, mask_c, scale,
    D: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q_n.w_c [N,C] from row pointers, STEP components at a time to save registers."""
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
    p_q, mask_n, p_landmarks, mask_c, p_log_z, p_shares, scale,
    D: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """r_nc [N,C] and rbar_n, from row pointers."""
    logits = query_dots(p_q, mask_n, p_landmarks, mask_c, scale, D, STEP, PRECISION)
    logits = tl.where(mask_n[:, None], logits, float("-inf"))
    b_log_z = tl.load(p_log_z, mask=mask_c, other=float("inf"))
    b_shares = tl.load(p_shares, mask=mask_c, other=0.0)
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
    blocks = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
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
        p_landmarks, p_log_z, p_shares = landmarks_ptr + bhc * D, log_z_ptr + bhc, shares_ptr + bhc
        b_r, b_rbar = query_alignment(
            p_q, mask_n, p_landmarks, mask_c, p_log_z, p_shares, scale, D, STEP, PRECISION
        )
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
