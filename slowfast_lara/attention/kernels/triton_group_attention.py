"""Kernels of attention over the groups of each frame, for `merged`.

    out_nf = sum_c p_ncf v_cf,   p_ncf = softmax_c(q_n.k_cf / sqrt(d) + b_cf)

A tile holds all groups of a frame, so softmax needs no running statistics. In the backward pass,

    dp_ncf = dout_nf.v_cf,   dlogit_ncf = p_ncf (dp_ncf - sum_c p_ncf dp_ncf)
    dk_cf = sum_n dlogit_ncf q_n / sqrt(d),   dv_cf = sum_n p_ncf dout_nf
    db_cf = sum_n dlogit_ncf
    dq_n = sum_cf dlogit_ncf k_cf / sqrt(d) + dr / N

where dr is the gradient of the mean query; `dr_ptr` holds one part of dr per frame. A program of
`attend_forward` and of `attend_backward_queries` owns a block of queries and loops over the frames.
A program of `attend_backward_groups` owns a block of head components of dk_cf and dv_cf, for all
groups of a frame, and loops over the queries. Each sum is computed by one program, in a fixed
order.

q [B,h,N,d] and dout [B,F,N,h,d] only need a last stride of 1; all other tensors are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import dot_gradient, own_block


@triton.jit
def attend_forward(
    q_ptr, kc_ptr, vc_ptr, biases_ptr, out_ptr,
    q_stride_b, q_stride_h, q_stride_n, scale, H, N, F, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    bh, b, h, _, n = own_block(N, 1, H, BLOCK_N)
    n, c, d = n.to(tl.int64), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    mask_nd = (n < N)[:, None] & (d < D)[None, :]
    mask_cd = (c < C)[:, None] & (d < D)[None, :]
    p_q = q_ptr + b * q_stride_b + h * q_stride_h + n[:, None] * q_stride_n + d[None, :]
    b_q = tl.load(p_q, mask=mask_nd, other=0.0)
    for f in range(F):
        fc = (bh * F + f) * C + c
        cd = fc[:, None] * D + d[None, :]
        b_k = tl.load(kc_ptr + cd, mask=mask_cd, other=0.0)
        b_b = tl.load(biases_ptr + fc, mask=c < C, other=float("-inf"))
        logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale + b_b[None, :]
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        b_v = tl.load(vc_ptr + cd, mask=mask_cd, other=0.0)
        b_out = tl.dot(weights.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_out = b_out / tl.sum(weights, 1)[:, None]
        p_out = out_ptr + (((b * F + f) * N + n[:, None]) * H + h) * D + d[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=mask_nd)


@triton.jit
def attend_backward_groups(
    q_ptr, kc_ptr, vc_ptr, biases_ptr, dout_ptr, dkc_ptr, dvc_ptr, dbiases_ptr,
    q_stride_b, q_stride_h, q_stride_n, dout_stride_b, dout_stride_f, dout_stride_n, dout_stride_h,
    scale, H, N, F, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh, b, h, f, e = own_block(D, F, H, BLOCK_E)
    c, d, i = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    mask_cd = (c < C)[:, None] & (d < D)[None, :]
    fc = (bh * F + f) * C + c
    cd = fc[:, None] * D + d[None, :]
    b_k = tl.load(kc_ptr + cd, mask=mask_cd, other=0.0)
    b_v = tl.load(vc_ptr + cd, mask=mask_cd, other=0.0)
    b_b = tl.load(biases_ptr + fc, mask=c < C, other=float("-inf"))[:, None]
    p_q = q_ptr + b * q_stride_b + h * q_stride_h
    p_dout = dout_ptr + b * dout_stride_b + f.to(tl.int64) * dout_stride_f + h * dout_stride_h
    b_dk = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
    b_dv = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
    b_db = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, N, BLOCK_N):
        n = (start + i).to(tl.int64)[:, None]
        mask_nd = (n < N) & (d < D)[None, :]
        b_q = tl.load(p_q + n * q_stride_n + d[None, :], mask=mask_nd, other=0.0)
        logits = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale + b_b  # [C,N]
        weights = tl.exp(logits - tl.max(logits, 0)[None, :])
        weights = weights / tl.sum(weights, 0)[None, :]
        # Out-of-range queries have zero gradients, so they need no mask below.
        b_dout = tl.load(p_dout + n * dout_stride_n + d[None, :], mask=mask_nd, other=0.0)
        dweights = tl.dot(b_v, tl.trans(b_dout), input_precision=PRECISION)
        dlogits = weights * (dweights - tl.sum(weights * dweights, 0)[None, :])
        b_db += tl.sum(dlogits, 1)
        if BLOCK_E < BLOCK_D:
            mask_ne = (n < N) & (e < D)[None, :]
            b_q = tl.load(p_q + n * q_stride_n + e[None, :], mask=mask_ne, other=0.0)
            b_dout = tl.load(p_dout + n * dout_stride_n + e[None, :], mask=mask_ne, other=0.0)
        b_dk += dot_gradient(dlogits, b_q, False, PRECISION)
        b_dv += tl.dot(weights.to(b_dout.dtype), b_dout, input_precision=PRECISION)
    ce, mask_ce = fc[:, None] * D + e[None, :], (c < C)[:, None] & (e < D)[None, :]
    tl.store(dkc_ptr + ce, (b_dk * scale).to(dkc_ptr.dtype.element_ty), mask=mask_ce)
    tl.store(dvc_ptr + ce, b_dv.to(dvc_ptr.dtype.element_ty), mask=mask_ce)
    # All programs of a frame compute this sum; the program of the first components stores it.
    tl.store(dbiases_ptr + fc, b_db, mask=(c < C) & (tl.min(e, 0) == 0))


@triton.jit
def attend_backward_queries(
    q_ptr, kc_ptr, vc_ptr, biases_ptr, dout_ptr, dr_ptr, dq_ptr,
    q_stride_b, q_stride_h, q_stride_n, dout_stride_b, dout_stride_f, dout_stride_n, dout_stride_h,
    scale, H, N, F, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    bh, b, h, _, n = own_block(N, 1, H, BLOCK_N)
    n, c, d = n.to(tl.int64)[:, None], tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    mask_nd = (n < N) & (d < D)[None, :]
    mask_cd = (c < C)[:, None] & (d < D)[None, :]
    p_q = q_ptr + b * q_stride_b + h * q_stride_h + n * q_stride_n + d[None, :]
    b_q = tl.load(p_q, mask=mask_nd, other=0.0)
    p_dout = dout_ptr + b * dout_stride_b + h * dout_stride_h + n * dout_stride_n + d[None, :]
    b_dq = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dr = tl.zeros([BLOCK_D], tl.float32)
    for f in range(F):
        fc = (bh * F + f) * C + c
        cd = fc[:, None] * D + d[None, :]
        b_k = tl.load(kc_ptr + cd, mask=mask_cd, other=0.0)
        b_b = tl.load(biases_ptr + fc, mask=c < C, other=float("-inf"))
        logits = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale + b_b[None, :]
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        b_v = tl.load(vc_ptr + cd, mask=mask_cd, other=0.0)
        p_frame = p_dout + tl.cast(f, tl.int64) * dout_stride_f
        b_dout = tl.load(p_frame, mask=mask_nd, other=0.0)
        dweights = tl.dot(b_dout, tl.trans(b_v), input_precision=PRECISION)
        dlogits = weights * (dweights - tl.sum(weights * dweights, 1)[:, None])
        b_dq += dot_gradient(dlogits, b_k, False, PRECISION)
        dr += tl.load(dr_ptr + (bh * F + f) * D + d, mask=d < D, other=0.0)
    p_dq = dq_ptr + (bh * N + n) * D + d[None, :]
    b_dq = b_dq * scale + (dr / N)[None, :]
    tl.store(p_dq, b_dq.to(dq_ptr.dtype.element_ty), mask=mask_nd)
