"""The temporal stage of trajectory attention (models/temporal.py), in Triton.

For every token, with absorbed queries u_nh = W_h^T q_nh that exist for a few tokens and a few
columns of x at a time:

    temporal_scores   s_nhf = u_nh.x_nf, and its softmax over the frames
    temporal_pool     y_nh = W_h (sum_f a_nhf x_nf)

Backward both return with other arguments: the gradient of the attention is temporal_scores
of the output's gradient, and that of q is temporal_pool of the scores' gradient ds.

    temporal_spread   dx_nf = sum_h ds_nhf u_nh + sum_h a_nhf (V_h^T dy_nh)

`temporal_weight` owns some columns of the weight and a part of the tokens, and sums
dW_h = sum_n q_nh (sum_f ds_nhf x_nf)^T in one order.

Without a projection of the values, V_h picks the columns of head h.

The products over frames and heads are of one token each, hence three dimensions: a token's
[h,D] times its [D,F]. Pointers: x [B,F,N,D] with the strides given; q and y [B,N,h,d], a and
ds [B,N,h,F], weights [h,d,D]: contiguous. H, E and D are the numbers of heads, of a head's
columns and of all columns. Tiles have BLOCK_H heads and BLOCK_E columns of a head, and programs
or loops go through all of them: there may be any number. The numbers of one clip are counted
in 32 bits, to save registers: the operators are not given more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import in_two


@triton.jit
def load_heads(ptr, n, n_ok, h, e, H, E):
    """Rows of [tokens,h,d] -> [h,tokens,d]."""
    ok = (h < H)[:, None, None] & n_ok[None, :, None] & (e < E)[None, None, :]
    cells = (n[None, :, None] * H + h[:, None, None]) * E + e[None, None, :]
    return tl.load(ptr + cells, mask=ok, other=0.0)


@triton.jit
def load_weight(ptr, h, e, column, H, E, D):
    """Columns of the weight, [h,d,columns]."""
    ok = (h < H)[:, None, None] & (e < E)[None, :, None] & (column < D)[None, None, :]
    cells = (h[:, None, None] * E + e[None, :, None]) * D + column[None, None, :]
    return tl.load(ptr + cells, mask=ok, other=0.0)


@triton.jit
def load_over_frames(ptr, n, n_ok, h, f, H, F):
    """Some heads and frames of [tokens,h,F]."""
    ok = n_ok[:, None, None] & (h < H)[None, :, None] & (f < F)[None, None, :]
    cells = (n[:, None, None] * H + h[None, :, None]) * F + f[None, None, :]
    return tl.load(ptr + cells, mask=ok, other=0.0)


@triton.jit
def load_tokens(ptr, n, n_ok, f, column, frame_stride, token_stride, F, D):
    """x of some tokens, frames and columns, [tokens,F,columns]; ptr is at the clip."""
    ok = n_ok[:, None, None] & (f < F)[None, :, None] & (column < D)[None, None, :]
    cells = f[None, :, None] * frame_stride + n[:, None, None] * token_stride
    return tl.load(ptr + cells + column[None, None, :], mask=ok, other=0.0)


@triton.jit
def absorbed(
    q_ptr, weight_ptr, n, n_ok, h, column, H, E, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr
):
    """W_h^T q_nh for some tokens, heads and columns, [tokens,h,columns] float32."""
    total = tl.zeros([h.shape[0], n.shape[0], column.shape[0]], tl.float32)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        q = load_heads(q_ptr, n, n_ok, h, e, H, E)
        weight = load_weight(weight_ptr, h, e, column, H, E, H * E)
        total = tl.dot(q, weight, acc=total, input_precision=PRECISION)
    return tl.permute(total, (1, 0, 2))


@triton.jit
def of_own_head(ptr, n, n_ok, h, column, H, E):
    """What `absorbed` is without a projection: columns of [tokens,D], each at its own head."""
    ok = n_ok[:, None] & (column < H * E)[None, :]
    values = tl.load(ptr + n[:, None] * (H * E) + column[None, :], mask=ok, other=0.0)
    own = (column // E)[None, None, :] == h[None, :, None]
    return tl.where(own, values[:, None, :], 0.0)


@triton.jit
def temporal_scores(
    q_ptr,
    x_ptr,
    weight_ptr,
    attention_ptr,
    out_ptr,
    x_batch,
    x_frame,
    x_token,
    scale,
    N,
    F,
    H,
    E,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PROJECT: tl.constexpr,
    THEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """THEN: "softmax" over the frames, its "gradient" (both with all frames in a tile), or "".

    The gradient is of the scores before `scale`."""
    blocks, frame_blocks = tl.cdiv(N, BLOCK_N), tl.cdiv(F, BLOCK_F)
    head_blocks = tl.cdiv(H, BLOCK_H)
    pid = tl.program_id(0)
    h = pid % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    pid = pid // head_blocks
    f = pid % frame_blocks * BLOCK_F + tl.arange(0, BLOCK_F)
    pid = pid // frame_blocks
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (pid // blocks).to(tl.int64)
    n_ok, f_ok = n < N, f < F
    D = H * E
    q_clip, x_clip, at = q_ptr + b * N * D, x_ptr + b * x_batch, b * N * H * F
    scores = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_F], tl.float32)
    for start in range(0, D, BLOCK_X):
        column = start + tl.arange(0, BLOCK_X)
        x = load_tokens(x_clip, n, n_ok, f, column, x_frame, x_token, F, D)
        x = tl.permute(x, (0, 2, 1))
        if PROJECT:
            wide = absorbed(q_clip, weight_ptr, n, n_ok, h, column, H, E, BLOCK_E, PRECISION)
            spread, rest = in_two(wide, x.dtype)
        else:
            spread = of_own_head(q_clip, n, n_ok, h, column, H, E)
        scores = tl.dot(spread, x, acc=scores, input_precision=PRECISION)
        # Logits stand in an exponent: there the rounded part of large ones counts.
        if PROJECT and THEN != "gradient" and x.dtype != tl.float32:
            scores = tl.dot(rest, x, acc=scores)
    if THEN == "softmax":
        scores = tl.where(f_ok[None, None, :], scores * scale, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, 2)[:, :, None])
        scores = weights / tl.sum(weights, 2)[:, :, None]
    if THEN == "gradient":
        attention = load_over_frames(attention_ptr + at, n, n_ok, h, f, H, F)
        mean = tl.sum(attention * scores, 2)
        scores = scale * attention * (scores - mean[:, :, None])
    ok = n_ok[:, None, None] & (h < H)[None, :, None] & f_ok[None, None, :]
    cells = (n[:, None, None] * H + h[None, :, None]) * F + f[None, None, :]
    tl.store(out_ptr + at + cells, scores, mask=ok)


@triton.jit
def pooled(
    over_frames_ptr,
    x_ptr,
    n,
    n_ok,
    h,
    column,
    x_frame,
    x_token,
    F,
    H,
    D,
    BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sum_f a_nhf x_nf for some columns: [tokens,h,columns] float32."""
    total = tl.zeros([n.shape[0], h.shape[0], column.shape[0]], tl.float32)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)
        over_frames = load_over_frames(over_frames_ptr, n, n_ok, h, f, H, F)
        x = load_tokens(x_ptr, n, n_ok, f, column, x_frame, x_token, F, D)
        total = tl.dot(over_frames.to(x.dtype), x, acc=total, input_precision=PRECISION)
    return total


@triton.jit
def temporal_pool(
    over_frames_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_batch,
    x_frame,
    x_token,
    N,
    F,
    H,
    E,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks, head_blocks, e_blocks = tl.cdiv(N, BLOCK_N), tl.cdiv(H, BLOCK_H), tl.cdiv(E, BLOCK_E)
    pid = tl.program_id(0)
    e = pid % e_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    h = pid // e_blocks % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    pid = pid // (e_blocks * head_blocks)
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (pid // blocks).to(tl.int64)
    n_ok = n < N
    D = H * E
    x_clip, over_frames = x_ptr + b * x_batch, over_frames_ptr + b * N * H * F
    out = tl.zeros([BLOCK_H, BLOCK_N, BLOCK_E], tl.float32)
    for start in range(0, D, BLOCK_X):
        column = start + tl.arange(0, BLOCK_X)
        total = pooled(
            over_frames, x_clip, n, n_ok, h, column, x_frame, x_token, F, H, D, BLOCK_F, PRECISION
        )
        weight = load_weight(weight_ptr, h, e, column, H, E, D)
        per_head = tl.permute(total.to(weight.dtype), (1, 0, 2))
        out = tl.dot(per_head, tl.permute(weight, (0, 2, 1)), acc=out, input_precision=PRECISION)
    he_ok = (h < H)[:, None] & (e < E)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + h[:, None] * E + e[None, :], mask=he_ok, other=0.0)
        out += bias[:, None, :].to(tl.float32)
    cells = b * N * D + (n[None, :, None] * H + h[:, None, None]) * E + e[None, None, :]
    ok = he_ok[:, None, :] & n_ok[None, :, None]
    tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def temporal_sum(
    attention_ptr,
    x_ptr,
    out_ptr,
    x_batch,
    x_frame,
    x_token,
    N,
    F,
    H,
    E,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """temporal_pool without a projection: each column has the weights of its own head."""
    D = H * E
    blocks, column_blocks = tl.cdiv(N, BLOCK_N), tl.cdiv(D, BLOCK_X)
    pid = tl.program_id(0)
    column = pid % column_blocks * BLOCK_X + tl.arange(0, BLOCK_X)
    n = pid // column_blocks % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    b = (pid // (column_blocks * blocks)).to(tl.int64)
    token = b * N + n
    ok = (n < N)[:, None] & (column < D)[None, :]
    x_cells = x_ptr + b * x_batch + n[:, None] * x_token + column[None, :]
    attention_cells = attention_ptr + (token[:, None] * H + (column // E)[None, :]) * F
    out = tl.zeros([BLOCK_N, BLOCK_X], tl.float32)
    for f in range(F):
        attention = tl.load(attention_cells + f, mask=ok, other=0.0)
        x = tl.load(x_cells + f * x_frame, mask=ok, other=0.0)
        out += attention * x.to(tl.float32)
    cells = token[:, None] * D + column[None, :]
    tl.store(out_ptr + cells, out.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def temporal_spread(
    q_ptr,
    grad_ptr,
    key_weight_ptr,
    value_weight_ptr,
    attention_ptr,
    grad_scores_ptr,
    grad_x_ptr,
    N,
    F,
    H,
    E,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PROJECT: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    n_ok = n < N
    q_clip, grad_clip, at = q_ptr + b * N * D, grad_ptr + b * N * D, b * N * H * F
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    grad_x = tl.zeros([BLOCK_N, BLOCK_F, BLOCK_X], tl.float32)
    for first in range(0, H, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)
        slope = load_over_frames(grad_scores_ptr + at, n, n_ok, h, f, H, F).to(dtype)
        keys = absorbed(q_clip, key_weight_ptr, n, n_ok, h, column, H, E, BLOCK_E, PRECISION)
        slope = tl.permute(slope, (0, 2, 1))
        grad_x = tl.dot(slope, keys.to(dtype), acc=grad_x, input_precision=PRECISION)
        attention = load_over_frames(attention_ptr + at, n, n_ok, h, f, H, F).to(dtype)
        if PROJECT:
            values = absorbed(
                grad_clip, value_weight_ptr, n, n_ok, h, column, H, E, BLOCK_E, PRECISION
            ).to(dtype)
        else:
            values = of_own_head(grad_clip, n, n_ok, h, column, H, E)
        attention = tl.permute(attention, (0, 2, 1))
        grad_x = tl.dot(attention, values, acc=grad_x, input_precision=PRECISION)
    ok = n_ok[:, None, None] & (f < F)[None, :, None] & (column < D)[None, None, :]
    cells = (f[None, :, None] * N + n[:, None, None]) * D + column[None, None, :]
    tl.store(grad_x_ptr + b * F * N * D + cells, grad_x.to(dtype), mask=ok)


@triton.jit
def temporal_weight(
    q_ptr,
    x_ptr,
    over_frames_ptr,
    parts_ptr,
    x_batch,
    x_frame,
    x_token,
    B,
    N,
    F,
    H,
    E,
    STEPS,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each part of the tokens has STEPS blocks of BLOCK_N tokens, none across two clips."""
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
    grad = tl.zeros([BLOCK_H, BLOCK_E, BLOCK_X], tl.float32)
    for step in range(STEPS):
        block = part * STEPS + step
        b = (block // blocks).to(tl.int64)
        n = block % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        n_ok = (n < N) & (b < B)
        x_clip, over_frames = x_ptr + b * x_batch, over_frames_ptr + b * N * H * F
        total = pooled(
            over_frames, x_clip, n, n_ok, h, column, x_frame, x_token, F, H, D, BLOCK_F, PRECISION
        )
        q = load_heads(q_ptr + b * N * D, n, n_ok, h, e, H, E)
        per_head = tl.permute(total.to(q.dtype), (1, 0, 2))
        grad = tl.dot(tl.permute(q, (0, 2, 1)), per_head, acc=grad, input_precision=PRECISION)
    ok = (h < H)[:, None, None] & (e < E)[None, :, None] & (column < D)[None, None, :]
    cells = (h[:, None, None] * E + e[None, :, None]) * D + column[None, None, :]
    tl.store(parts_ptr + part.to(tl.int64) * D * D + cells, grad, mask=ok)
