"""Kernels of `key_stats`: the statistics L_cf and M_cf of the keys, per sample and frame.

For one frame f, whose index is left out,

    logit_cp = w_c.k_p - |k_p|^2/2,   L_c = log sum_p exp(logit_cp),   M_c = sum_p a_cp v_p

with weights a_cp = exp(logit_cp - L_c). A program loops over the keys of a frame once, with a
running maximum. In the backward pass, with g_c = dL_c - dM_c.M_c,

    dlogit_cp = a_cp (dM_c.v_p + g_c),   dv_p = sum_c a_cp dM_c
    dk_p = sum_c dlogit_cp w_c - k_p sum_c dlogit_cp,   dw_c = sum_p dlogit_cp k_p

One kernel computes the gradients of the keys and values, another the gradient of the samples. In
the latter, a program loops over a part of FRAMES frames, and the operator adds up the parts. Each
sum has a fixed order. M and dM have the dtype of v; M_lo is the remainder that rounding removed
from M.

The backward kernels recompute the logits. Rounding makes them differ from the logits of the forward
pass, which matters for large logits. A weight a_cp above 0.6 must be the largest weight of sample
c, so the saved largest weight (`peak`) replaces it. If `peak` is 1, then M_c = v_p for this key p.
In this case dlogit_cp is set to dL_c, because the formula above would add pure rounding error.

Flags: NORMS subtracts |k_p|^2/2. VALUES computes M_c. TIED: the keys are also the values, and dk is
the sum of both gradients.

Without NORMS and VALUES, k holds the queries and w the landmarks, and L_c is log Z_c, the
log-normaliser of the alignment scores. The "frames" of `key_stats_forward` are then parts of P
queries, of which the last may be shorter, and `key_stats_backward_keys` adds the float32 gradient
at `dv_ptr` to its result.

k and v [B,h,N,d], N = F*P, only need a last stride of 1; all other tensors are contiguous.
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


@triton.jit
def half_norms(k, scale):
    wide = k.to(tl.float32) * scale
    return tl.sum(wide * wide, 1) / 2


@triton.jit
def dot_means(dM, M_ptr, M_lo_ptr, cd, mask):
    """dM_c.M_c, with M_lo added to M_c because dM_c.v_p - dM_c.M_c may be small."""
    b_M = tl.load(M_ptr + cd, mask=mask, other=0.0).to(tl.float32)
    if dM.dtype != tl.float32:
        b_M += tl.load(M_lo_ptr + cd, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(dM.to(tl.float32) * b_M, 1)


@triton.jit
def key_stats_forward(
    w_ptr, k_ptr, v_ptr, L_ptr, peak_ptr, M_ptr, M_lo_ptr, N,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, scale, H, F, P, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, NORMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if not VALUES:
        F = tl.cdiv(N, P)
    bh, b, h, f, c = own_block(C, F, H, BLOCK_C)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_c, mask_d = c < C, d < D
    mask_cd = mask_c[:, None] & mask_d[None, :]
    b_w = tl.load(w_ptr + (bh * C + c[:, None]) * D + d[None, :], mask=mask_cd, other=0.0) * scale
    w_hi, w_lo = split_float32(b_w, k_ptr.dtype.element_ty)
    p_k = k_ptr + b * k_stride_b + h * k_stride_h + f.to(tl.int64) * P * k_stride_n
    p_v = v_ptr + b * v_stride_b + h * v_stride_h + f.to(tl.int64) * P * v_stride_n

    top = tl.full([BLOCK_C], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    b_M = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    length = P if VALUES else tl.minimum(P, N - f * P)
    for start in range(0, length, BLOCK_N):
        mask_p = start + i < length
        mask_pd = mask_p[:, None] & mask_d[None, :]
        first = tl.cast(start, tl.int64)
        p_rows = p_k + first * k_stride_n + i[:, None] * k_stride_n + d[None, :]
        b_k = tl.load(p_rows, mask=mask_pd, other=0.0)
        logits = dot_split_left(w_hi, w_lo, tl.trans(b_k), PRECISION)
        if NORMS:
            logits -= half_norms(b_k, scale)[None, :]
        logits = tl.where(mask_p[None, :], logits, float("-inf"))
        # `new` is finite, because the first block has at least one key.
        new = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp(logits - new[:, None])
        decay = tl.exp(top - new)
        total = total * decay + tl.sum(weights, 1)
        if VALUES:
            p_rows = p_v + first * v_stride_n + i[:, None] * v_stride_n + d[None, :]
            b_v = tl.load(p_rows, mask=mask_pd, other=0.0)
            weights_hi, weights_lo = split_float32(weights, b_v.dtype)
            b_M = b_M * decay[:, None]
            b_M += dot_split_left(weights_hi, weights_lo, b_v, PRECISION)
        top = new
    fc = (bh * F + f) * C + c
    tl.store(L_ptr + fc, top + tl.log(total), mask=mask_c)
    if VALUES:
        tl.store(peak_ptr + fc, 1 / total, mask=mask_c)
        M_hi, M_lo = split_float32(b_M / total[:, None], v_ptr.dtype.element_ty)
        cd = fc[:, None] * D + d[None, :]
        tl.store(M_ptr + cd, M_hi, mask=mask_cd)
        if v_ptr.dtype.element_ty != tl.float32:
            tl.store(M_lo_ptr + cd, M_lo, mask=mask_cd)


@triton.jit
def key_stats_backward_keys(
    w_ptr, k_ptr, v_ptr, L_ptr, peak_ptr, M_ptr, M_lo_ptr, dL_ptr, dM_ptr, dk_ptr, dv_ptr,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, scale, H, F, P, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr, TIED: tl.constexpr, NORMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh, b, h, f, p = own_block(P, F, H, BLOCK_N)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    mask_d = d < D
    mask_pd = (p < P)[:, None] & mask_d[None, :]
    n = (f * P + p).to(tl.int64)[:, None]
    p_k = k_ptr + b * k_stride_b + h * k_stride_h + n * k_stride_n + d[None, :]
    b_k = tl.load(p_k, mask=mask_pd, other=0.0)
    norms = half_norms(b_k, scale)
    if VALUES:
        p_v = v_ptr + b * v_stride_b + h * v_stride_h + n * v_stride_n + d[None, :]
        b_v = tl.load(p_v, mask=mask_pd, other=0.0)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dnorms = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + i
        mask_c = c < C
        mask_cd = mask_c[:, None] & mask_d[None, :]
        p_w = w_ptr + (bh * C + c[:, None]) * D + d[None, :]
        w_hi, w_lo = split_float32(tl.load(p_w, mask=mask_cd, other=0.0) * scale, b_k.dtype)
        logits = dot_split_right(b_k, tl.trans(w_hi), tl.trans(w_lo), PRECISION)
        if NORMS:
            logits -= norms[:, None]
        logits = tl.where((p < P)[:, None], logits, float("-inf"))
        fc = (bh * F + f) * C + c
        b_L = tl.load(L_ptr + fc, mask=mask_c, other=float("inf"))
        weights = tl.exp(logits - b_L[None, :])
        b_dL = tl.load(dL_ptr + fc, mask=mask_c, other=0.0)
        if VALUES:
            peak = tl.load(peak_ptr + fc, mask=mask_c, other=0.0)
            weights = tl.where(weights > 0.6, peak[None, :], weights)
            cd = fc[:, None] * D + d[None, :]
            b_dM = tl.load(dM_ptr + cd, mask=mask_cd, other=0.0)
            g = b_dL - dot_means(b_dM, M_ptr, M_lo_ptr, cd, mask_cd)
            b_dv = tl.dot(weights.to(b_v.dtype), b_dM, acc=b_dv, input_precision=PRECISION)
            dweights = tl.dot(b_v, tl.trans(b_dM), input_precision=PRECISION)
            dlogits = weights * (dweights + g[None, :])
            dlogits = tl.where(weights == 1, b_dL[None, :], dlogits)
        else:
            dlogits = weights * b_dL[None, :]
        b_dk += dot_gradient(dlogits, w_hi, not VALUES, PRECISION)
        if NORMS:
            dnorms += tl.sum(dlogits, 1)
    if NORMS:
        b_dk -= (dnorms * scale * scale)[:, None] * b_k.to(tl.float32)
    nd = (bh * F * P + n) * D + d[None, :]
    if not VALUES:
        b_dk += tl.load(dv_ptr + nd, mask=mask_pd, other=0.0)
    if TIED:
        b_dk += b_dv
    tl.store(dk_ptr + nd, b_dk.to(dk_ptr.dtype.element_ty), mask=mask_pd)
    if VALUES and not TIED:
        tl.store(dv_ptr + nd, b_dv.to(dv_ptr.dtype.element_ty), mask=mask_pd)


# The number of frames of a part depends on the batch size; see temporal_backward_weight about
# do_not_specialize.
@triton.jit(do_not_specialize=["FRAMES"])
def key_stats_backward_samples(
    w_ptr, k_ptr, v_ptr, L_ptr, peak_ptr, M_ptr, M_lo_ptr, dL_ptr, dM_ptr, dw_ptr, FRAMES,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, scale, H, F, P, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    NORMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(F, FRAMES)
    bh, b, h, part, c = own_block(C, parts, H, BLOCK_C)
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_c, mask_d = c < C, d < D
    mask_cd = mask_c[:, None] & mask_d[None, :]
    b_w = tl.load(w_ptr + (bh * C + c[:, None]) * D + d[None, :], mask=mask_cd, other=0.0) * scale
    w_hi, w_lo = split_float32(b_w, k_ptr.dtype.element_ty)
    p_k = k_ptr + b * k_stride_b + h * k_stride_h
    p_v = v_ptr + b * v_stride_b + h * v_stride_h
    b_dw = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for f in range(part * FRAMES, tl.minimum((part + 1) * FRAMES, F)):
        fc = (bh * F + f) * C + c
        b_L = tl.load(L_ptr + fc, mask=mask_c, other=float("inf"))
        peak = tl.load(peak_ptr + fc, mask=mask_c, other=0.0)[:, None]
        b_dL = tl.load(dL_ptr + fc, mask=mask_c, other=0.0)
        cd = fc[:, None] * D + d[None, :]
        b_dM = tl.load(dM_ptr + cd, mask=mask_cd, other=0.0)
        g = b_dL - dot_means(b_dM, M_ptr, M_lo_ptr, cd, mask_cd)
        for start in range(0, P, BLOCK_N):
            mask_p = start + i < P
            mask_pd = mask_p[:, None] & mask_d[None, :]
            first = tl.cast(f, tl.int64) * P + start
            p_rows = p_k + first * k_stride_n + i[:, None] * k_stride_n + d[None, :]
            b_k = tl.load(p_rows, mask=mask_pd, other=0.0)
            logits = dot_split_left(w_hi, w_lo, tl.trans(b_k), PRECISION)
            if NORMS:
                logits -= half_norms(b_k, scale)[None, :]
            # Mask out-of-range keys before summing over them.
            logits = tl.where(mask_p[None, :], logits, float("-inf"))
            weights = tl.exp(logits - b_L[:, None])
            weights = tl.where(weights > 0.6, peak, weights)
            p_rows = p_v + first * v_stride_n + i[:, None] * v_stride_n + d[None, :]
            b_v = tl.load(p_rows, mask=mask_pd, other=0.0)
            dweights = tl.dot(b_dM, tl.trans(b_v), input_precision=PRECISION)
            dlogits = weights * (dweights + g[:, None])
            dlogits = tl.where(weights == 1, b_dL[:, None], dlogits)
            b_dw += dot_gradient(dlogits, b_k, False, PRECISION)
    cd = ((bh * parts + part) * C + c[:, None]) * D + d[None, :]
    tl.store(dw_ptr + cd, b_dw * scale, mask=mask_cd)
