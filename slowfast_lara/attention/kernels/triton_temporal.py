"""Kernels of `temporal`, the temporal stage of trajectory attention (attention/temporal.py).

W_h and V_h are the weights of head h for keys and values. The kernels compute the absorbed queries
u_nh = W_h^T q_nh for a block of tokens and columns of x, and do not store them:

    temporal_scores            s_nhf = u_nh.x_nf,   a_nhf = softmax_f(s_nhf / sqrt(d))
    temporal_pool              y_nh = V_h (sum_f a_nhf x_nf), plus the bias if there is one
    temporal_sum               y_nh = sum_f a_nhf (x_nf)_h

where (x_nf)_h are the columns of head h. temporal_sum replaces temporal_pool if the values are not
projected; V_h below then selects these columns. The backward pass calls temporal_scores with dy and
V_h to compute ds, and temporal_pool with ds and W_h to compute dq. Its other kernels are

    temporal_backward_tokens   dx_nf = sum_h ds_nhf u_nh + sum_h a_nhf (V_h^T dy_nh)
    temporal_backward_weight   dW_h = sum_n q_nh (sum_f ds_nhf x_nf)^T, as partial sums over n;
                               dV_h in the same way from dy and a

The matmuls [h,D] @ [D,F] differ between tokens, so tl.dot is batched over tokens (3-D blocks).
x [B,F,N,D] only needs a last stride of 1. q and y [B,N,h,d], a and ds [B,N,h,F] and the weights
[h,d,D] are contiguous. H, E and D are the numbers of heads, of columns per head and of all columns.
There is no limit for them, because programs and loops divide them into blocks. Offsets inside a
clip are 32 bits, to save registers, so attention/temporal.py does not call the operator for clips
of 2**31 elements or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import split_float32


@triton.jit
def load_heads(ptr, n, mask_n, h, e, H, E):
    """Load a block of [N,h,d] as [h,N,d]."""
    mask = (h < H)[:, None, None] & mask_n[None, :, None] & (e < E)[None, None, :]
    offsets = (n[None, :, None] * H + h[:, None, None]) * E + e[None, None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def load_weight(ptr, h, e, column, H, E, D):
    """Load a block of the weight, [h,d,columns]."""
    mask = (h < H)[:, None, None] & (e < E)[None, :, None] & (column < D)[None, None, :]
    offsets = (h[:, None, None] * E + e[None, :, None]) * D + column[None, None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def load_coeffs(ptr, n, mask_n, h, f, H, F):
    """Load a block of the coefficients a or ds, [N,h,F]."""
    mask = mask_n[:, None, None] & (h < H)[None, :, None] & (f < F)[None, None, :]
    offsets = (n[:, None, None] * H + h[None, :, None]) * F + f[None, None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0)


@triton.jit
def load_tokens(p_x, n, mask_n, f, column, x_stride_f, x_stride_n, F, D):
    """Load a block of x as [N,F,columns]; p_x points to the clip."""
    mask = mask_n[:, None, None] & (f < F)[None, :, None] & (column < D)[None, None, :]
    offsets = f[None, :, None] * x_stride_f + n[:, None, None] * x_stride_n
    return tl.load(p_x + offsets + column[None, None, :], mask=mask, other=0.0)


@triton.jit
def absorbed(
    p_q, weight_ptr, n, mask_n, h, column, H, E, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr
):
    """u_nh = W_h^T q_nh, [N,h,columns] float32."""
    total = tl.zeros([h.shape[0], n.shape[0], column.shape[0]], tl.float32)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        b_q = load_heads(p_q, n, mask_n, h, e, H, E)
        b_weight = load_weight(weight_ptr, h, e, column, H, E, H * E)
        total = tl.dot(b_q, b_weight, acc=total, input_precision=PRECISION)
    return tl.permute(total, (1, 0, 2))


@triton.jit
def own_columns(ptr, n, mask_n, h, column, H, E):
    """Scatter columns of [N,D] into [N,h,columns]: zero except at the head of each column."""
    mask = mask_n[:, None] & (column < H * E)[None, :]
    values = tl.load(ptr + n[:, None] * (H * E) + column[None, :], mask=mask, other=0.0)
    own = (column // E)[None, None, :] == h[None, :, None]
    return tl.where(own, values[:, None, :], 0.0)


@triton.jit
def temporal_scores(
    q_ptr, x_ptr, weight_ptr, attention_ptr, out_ptr,
    x_stride_b, x_stride_f, x_stride_n, scale, N, F, H, E,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr, PROJECT: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the scores s_nhf, or the result of an EPILOGUE on them.

    EPILOGUE "softmax" writes a_nhf. EPILOGUE "gradient" takes the scores as gradients of a_nhf and
    writes ds_nhf. Both need all frames in one tile. With EPILOGUE "", raw scores are written.
    """
    blocks, frame_blocks = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    head_blocks = tl.cdiv(H, BLOCK_H)
    pid = tl.program_id(0)
    h = pid % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    pid = pid // head_blocks
    f = pid % frame_blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    pid = pid // frame_blocks
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (pid // blocks).to(tl.int64)
    mask_n, mask_f = n < N, f < F
    D = H * E
    p_q, p_x, clip = q_ptr + b * N * D, x_ptr + b * x_stride_b, b * N * H * F
    scores = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_F], tl.float32)
    for start in range(0, D, BLOCK_X):
        column = start + tl.arange(0, BLOCK_X)
        b_x = load_tokens(p_x, n, mask_n, f, column, x_stride_f, x_stride_n, F, D)
        b_x = tl.permute(b_x, (0, 2, 1))
        if PROJECT:
            b_u = absorbed(p_q, weight_ptr, n, mask_n, h, column, H, E, BLOCK_E, PRECISION)
            u_hi, u_lo = split_float32(b_u, b_x.dtype)
        else:
            u_hi = own_columns(p_q, n, mask_n, h, column, H, E)
        scores = tl.dot(u_hi, b_x, acc=scores, input_precision=PRECISION)
        # Scores enter an exponential, so the rounding error of u_nh matters if scores are large.
        if PROJECT and EPILOGUE != "gradient" and b_x.dtype != tl.float32:
            scores = tl.dot(u_lo, b_x, acc=scores)
    if EPILOGUE == "softmax":
        scores = tl.where(mask_f[None, None, :], scores * scale, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, 2)[:, :, None])
        scores = weights / tl.sum(weights, 2)[:, :, None]
    if EPILOGUE == "gradient":
        attention = load_coeffs(attention_ptr + clip, n, mask_n, h, f, H, F)
        mean = tl.sum(attention * scores, 2)
        scores = scale * attention * (scores - mean[:, :, None])
    mask = mask_n[:, None, None] & (h < H)[None, :, None] & mask_f[None, None, :]
    offsets = (n[:, None, None] * H + h[None, :, None]) * F + f[None, None, :]
    tl.store(out_ptr + clip + offsets, scores, mask=mask)


@triton.jit
def pooled(
    p_coeffs, p_x, n, mask_n, h, column, x_stride_f, x_stride_n, F, H, D,
    BLOCK_F: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_f coeffs_nhf x_nf, [N,h,columns] float32."""
    total = tl.zeros([n.shape[0], h.shape[0], column.shape[0]], tl.float32)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)
        coeffs = load_coeffs(p_coeffs, n, mask_n, h, f, H, F)
        b_x = load_tokens(p_x, n, mask_n, f, column, x_stride_f, x_stride_n, F, D)
        total = tl.dot(coeffs.to(b_x.dtype), b_x, acc=total, input_precision=PRECISION)
    return total


@triton.jit
def temporal_pool(
    coeffs_ptr, x_ptr, weight_ptr, bias_ptr, out_ptr,
    x_stride_b, x_stride_f, x_stride_n, N, F, H, E,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks, head_blocks, e_blocks = tl.cdiv(N, BLOCK_N), tl.cdiv(H, BLOCK_H), tl.cdiv(E, BLOCK_E)
    pid = tl.program_id(0)
    e = pid % e_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    h = pid // e_blocks % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    pid = pid // (e_blocks * head_blocks)
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (pid // blocks).to(tl.int64)
    mask_n = n < N
    D = H * E
    p_x, p_coeffs = x_ptr + b * x_stride_b, coeffs_ptr + b * N * H * F
    out = tl.zeros([BLOCK_H, BLOCK_N, BLOCK_E], tl.float32)
    for start in range(0, D, BLOCK_X):
        column = start + tl.arange(0, BLOCK_X)
        total = pooled(
            p_coeffs, p_x, n, mask_n, h, column, x_stride_f, x_stride_n, F, H, D, BLOCK_F, PRECISION
        )
        b_weight = load_weight(weight_ptr, h, e, column, H, E, D)
        total = tl.permute(total.to(b_weight.dtype), (1, 0, 2))
        out = tl.dot(total, tl.permute(b_weight, (0, 2, 1)), acc=out, input_precision=PRECISION)
    mask_he = (h < H)[:, None] & (e < E)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + h[:, None] * E + e[None, :], mask=mask_he, other=0.0)
        out += bias[:, None, :].to(tl.float32)
    offsets = b * N * D + (n[None, :, None] * H + h[:, None, None]) * E + e[None, None, :]
    mask = mask_he[:, None, :] & mask_n[None, :, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def temporal_sum(
    attention_ptr, x_ptr, out_ptr, x_stride_b, x_stride_f, x_stride_n, N, F, H, E,
    BLOCK_N: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    D = H * E
    blocks, column_blocks = tl.cdiv(N, BLOCK_N), tl.cdiv(D, BLOCK_X)
    pid = tl.program_id(0)
    column = pid % column_blocks * BLOCK_X + tl.arange(0, BLOCK_X)
    n = pid // column_blocks % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (pid // (column_blocks * blocks)).to(tl.int64)
    bn = b * N + n
    mask = (n < N)[:, None] & (column < D)[None, :]
    p_x = x_ptr + b * x_stride_b + n[:, None] * x_stride_n + column[None, :]
    p_attention = attention_ptr + (bn[:, None] * H + (column // E)[None, :]) * F
    out = tl.zeros([BLOCK_N, BLOCK_X], tl.float32)
    for f in range(F):
        attention = tl.load(p_attention + f, mask=mask, other=0.0)
        b_x = tl.load(p_x + f * x_stride_f, mask=mask, other=0.0)
        out += attention * b_x.to(tl.float32)
    p_out = out_ptr + bn[:, None] * D + column[None, :]
    tl.store(p_out, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def temporal_backward_tokens(
    q_ptr, dy_ptr, key_weight_ptr, value_weight_ptr, attention_ptr, dscores_ptr, dx_ptr,
    N, F, H, E,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr, PROJECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    D = H * E
    blocks, column_blocks = tl.cdiv(N, BLOCK_N), tl.cdiv(D, BLOCK_X)
    frame_blocks = tl.cdiv(F, BLOCK_F)
    pid = tl.program_id(0)
    f = pid % frame_blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    pid = pid // frame_blocks
    column = pid % column_blocks * BLOCK_X + tl.arange(0, BLOCK_X)
    pid = pid // column_blocks
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (pid // blocks).to(tl.int64)
    mask_n = n < N
    p_q, p_dy, clip = q_ptr + b * N * D, dy_ptr + b * N * D, b * N * H * F
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    b_dx = tl.zeros([BLOCK_N, BLOCK_F, BLOCK_X], tl.float32)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        dscores = load_coeffs(dscores_ptr + clip, n, mask_n, h, f, H, F).to(dtype)
        b_u = absorbed(p_q, key_weight_ptr, n, mask_n, h, column, H, E, BLOCK_E, PRECISION)
        dscores = tl.permute(dscores, (0, 2, 1))
        b_dx = tl.dot(dscores, b_u.to(dtype), acc=b_dx, input_precision=PRECISION)
        attention = load_coeffs(attention_ptr + clip, n, mask_n, h, f, H, F).to(dtype)
        if PROJECT:
            dvalues = absorbed(
                p_dy, value_weight_ptr, n, mask_n, h, column, H, E, BLOCK_E, PRECISION
            ).to(dtype)
        else:
            dvalues = own_columns(p_dy, n, mask_n, h, column, H, E)
        attention = tl.permute(attention, (0, 2, 1))
        b_dx = tl.dot(attention, dvalues, acc=b_dx, input_precision=PRECISION)
    mask = mask_n[:, None, None] & (f < F)[None, :, None] & (column < D)[None, None, :]
    offsets = (f[None, :, None] * N + n[:, None, None]) * D + column[None, None, :]
    tl.store(dx_ptr + b * F * N * D + offsets, b_dx.to(dtype), mask=mask)


# Without do_not_specialize, Triton compiles a variant for the argument value 1, and another variant
# for multiples of 16. The batch size varies, so Triton would compile them in the middle of a run.
@triton.jit(do_not_specialize=["B", "STEPS"])
def temporal_backward_weight(
    q_ptr, x_ptr, coeffs_ptr, partial_ptr,
    x_stride_b, x_stride_f, x_stride_n, B, N, F, H, E, STEPS,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of dW_h, each over STEPS blocks of BLOCK_N tokens; no block spans two clips."""
    D = H * E
    head_blocks, e_blocks = tl.cdiv(H, BLOCK_H), tl.cdiv(E, BLOCK_E)
    column_blocks = tl.cdiv(D, BLOCK_X)
    pid = tl.program_id(0)
    e = pid % e_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    h = pid // e_blocks % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    pid = pid // (e_blocks * head_blocks)
    column = pid % column_blocks * BLOCK_X + tl.arange(0, BLOCK_X)
    part = pid // column_blocks
    blocks = tl.cdiv(N, BLOCK_N)
    b_dW = tl.zeros([BLOCK_H, BLOCK_E, BLOCK_X], tl.float32)
    for step in range(STEPS):
        block = part * STEPS + step
        b = (block // blocks).to(tl.int64)
        n = block % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = (n < N) & (b < B)
        p_x, p_coeffs = x_ptr + b * x_stride_b, coeffs_ptr + b * N * H * F
        total = pooled(
            p_coeffs, p_x, n, mask_n, h, column, x_stride_f, x_stride_n, F, H, D, BLOCK_F, PRECISION
        )
        b_q = load_heads(q_ptr + b * N * D, n, mask_n, h, e, H, E)
        total = tl.permute(total.to(b_q.dtype), (1, 0, 2))
        b_dW = tl.dot(tl.permute(b_q, (0, 2, 1)), total, acc=b_dW, input_precision=PRECISION)
    mask = (h < H)[:, None, None] & (e < E)[None, :, None] & (column < D)[None, None, :]
    offsets = (h[:, None, None] * E + e[None, :, None]) * D + column[None, None, :]
    tl.store(partial_ptr + part.to(tl.int64) * D * D + offsets, b_dW, mask=mask)
