"""The temporal stage of trajectory attention in Triton: one pass forward, three backward.

Query t (token n of clip b) has one pooled token x_tf for every frame f. With W_k,h and
W_v,h the rows of head h, scale s = d**-0.5 (the identities are in models/temporal.py):

    u_th = s W_k,h^T q_th                       absorbed query
    a_thf = softmax_f(u_th.x_tf)                attention
    y_th = sum_f a_thf x_tf,h                   values are x, or
    y_th = W_v,h p_th + b_v,h, p_th = sum_f a_thf x_tf

and backward, from g = dy, with v_th = W_v,h^T g_th (or g_th in the columns of head h):

    e_thf = a_thf (v_th.x_tf - sum_f' a_thf' v_th.x_tf')        gradient of the logits
    dq_th = s W_k,h c_th,   c_th = sum_f e_thf x_tf
    dx_tf = sum_h e_thf u_th + a_thf v_th
    dW_k,h = s sum_t q_th c_th^T,   dW_v,h = sum_t g_th p_th^T

u, v, c and p are [T,h,D], the largest tensors there are: they exist in blocks of D only,
inside a program. What is kept for the backward pass is a, [h,F,T] in float32. Sums over
tokens are made in a fixed number of parts and then added: no atomics, so that the same
inputs give the same bits.

Shapes: B batch, N queries of a clip, T = B*N, h heads, F frames, d head size, D = h*d.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tokens(block, size: tl.constexpr, N, T):
    """The tokens of a block: their number, clip and place in it, and which of them exist."""
    t = block * size + tl.arange(0, size)
    return t, (t // N).to(tl.int64), (t % N).to(tl.int64), t < T


@triton.jit
def _load_heads(x, b, n, t_ok, h, H, D_HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """q or g [B,N,h,d], given with its strides -> [heads, tokens, d]."""
    c = tl.arange(0, BLOCK_D)
    rows = b[None, :] * x[1] + n[None, :] * x[2] + h[:, None] * x[3]
    ok = (h < H)[:, None, None] & t_ok[None, :, None] & (c < D_HEAD)[None, None, :]
    return tl.load(x[0] + rows[:, :, None] + c[None, None, :], mask=ok, other=0.0)


@triton.jit
def _load_weight(weight, first_row, h, H, columns, D_HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of W from `first_row`, by heads, some columns -> [heads, d, columns]."""
    c = tl.arange(0, BLOCK_D)
    rows = first_row + h[:, None] * D_HEAD + c[None, :]
    ok = (h < H)[:, None] & (c < D_HEAD)[None, :]
    at = weight + rows[:, :, None] * (H * D_HEAD) + columns[None, None, :]
    mask = ok[:, :, None] & (columns < H * D_HEAD)[None, None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _take_frame(weights, frames, f):
    """[heads, tokens, frames] -> those of frame f, [heads, tokens, 1]."""
    return tl.sum(tl.where(frames[None, None, :] == f, weights, 0.0), 2, keep_dims=True)


@triton.jit
def _products(left, x, offsets, ok, frames, F):
    """left [heads, tokens, columns] times x_f, summed over columns: [heads, tokens, frames]."""
    out = tl.zeros([left.shape[0], left.shape[1], frames.shape[0]], tl.float32)
    x_f = x[0]
    for f in range(F):
        tokens = tl.load(x_f + offsets, mask=ok, other=0.0).to(tl.float32)
        dots = tl.sum(left * tokens, 2, keep_dims=True)
        out += tl.where(frames[None, None, :] == f, dots, 0.0)
        x_f += x[2]
    return out


@triton.jit
def _weighted_sum(weights, x, offsets, ok, frames, F, COLUMNS: tl.constexpr):
    """sum_f weights_f x_f: [heads, tokens, frames] -> [heads, tokens, columns]."""
    out = tl.zeros([weights.shape[0], weights.shape[1], COLUMNS], tl.float32)
    x_f = x[0]
    for f in range(F):
        tokens = tl.load(x_f + offsets, mask=ok, other=0.0).to(tl.float32)
        out += _take_frame(weights, frames, f) * tokens
        x_f += x[2]
    return out


@triton.jit
def _columns_of_x(x, b, n, t_ok, columns, D):
    """Where some columns of the tokens of one frame are, [1, tokens, columns], and if they are."""
    rows = b * x[1] + n * x[3]
    ok = t_ok[:, None] & (columns < D)[None, :]
    return (rows[:, None] + columns[None, :])[None], ok[None]


@triton.jit
def _heads_of_x(x, b, n, t_ok, h, H, D_HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where the columns of each head are, [heads, tokens, d], and if they are."""
    c = tl.arange(0, BLOCK_D)
    rows = b[None, :] * x[1] + n[None, :] * x[3] + h[:, None] * D_HEAD
    ok = (h < H)[:, None, None] & t_ok[None, :, None] & (c < D_HEAD)[None, None, :]
    return rows[:, :, None] + c[None, None, :], ok


@triton.jit
def _attention_at(t, t_ok, h, frames, H, F, T):
    """Where a tile [heads, tokens, frames] of a is, and if it is."""
    rows = h[:, None, None] * F + frames[None, None, :]
    ok = (h < H)[:, None, None] & t_ok[None, :, None] & (frames < F)[None, None, :]
    return rows.to(tl.int64) * T + t[None, :, None], ok


@triton.jit
def _store_heads(out, value, t, t_ok, h, H, D_HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """[heads, tokens, d] into a dense [T,h,d]."""
    c = tl.arange(0, BLOCK_D)
    rows = t[None, :].to(tl.int64) * H + h[:, None]
    ok = (h < H)[:, None, None] & t_ok[None, :, None] & (c < D_HEAD)[None, None, :]
    at = out + rows[:, :, None] * D_HEAD + c[None, None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def forward_kernel(
    q,
    x,
    weight,
    bias,
    attention,
    out,
    scale,
    sizes,
    PROJECT: tl.constexpr,
    BIAS: tl.constexpr,
    D_HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some tokens, some heads: their attention over the frames, and y."""
    H, N, T, F = sizes
    D = H * D_HEAD
    groups = tl.cdiv(H, BLOCK_H)  # of heads; neighbours read the same x
    t, b, n, t_ok = _tokens(tl.program_id(0) // groups, BLOCK_T, N, T)
    h = tl.program_id(0) % groups * BLOCK_H + tl.arange(0, BLOCK_H)
    frames = tl.arange(0, BLOCK_F)
    queries = _load_heads(q, b, n, t_ok, h, H, D_HEAD, BLOCK_D)
    logits = tl.zeros([BLOCK_H, BLOCK_T, BLOCK_F], tl.float32)
    for start in range(0, D, BLOCK_W):
        columns = start + tl.arange(0, BLOCK_W)
        w_k = _load_weight(weight, 0, h, H, columns, D_HEAD, BLOCK_D)
        absorbed = tl.dot(queries, w_k, input_precision=PRECISION)
        offsets, x_ok = _columns_of_x(x, b, n, t_ok, columns, D)
        logits += _products(absorbed, x, offsets, x_ok, frames, F)
    logits = tl.where((frames < F)[None, None, :], logits * scale, float("-inf"))
    shares = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    shares = shares / tl.sum(shares, 2, keep_dims=True)
    at, ok = _attention_at(t, t_ok, h, frames, H, F, T)
    tl.store(attention + at, shares, mask=ok)

    if PROJECT:
        y = tl.zeros([BLOCK_H, BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_W):
            columns = start + tl.arange(0, BLOCK_W)
            offsets, x_ok = _columns_of_x(x, b, n, t_ok, columns, D)
            pooled = _weighted_sum(shares, x, offsets, x_ok, frames, F, BLOCK_W)
            w_v = _load_weight(weight, D, h, H, columns, D_HEAD, BLOCK_D)
            w_v = tl.permute(w_v, (0, 2, 1))
            y = tl.dot(pooled.to(w_v.dtype), w_v, acc=y, input_precision=PRECISION)
        if BIAS:
            c = tl.arange(0, BLOCK_D)
            b_ok = (h < H)[:, None] & (c < D_HEAD)[None, :]
            b_v = tl.load(bias + D + h[:, None] * D_HEAD + c[None, :], mask=b_ok, other=0.0)
            y += b_v[:, None, :].to(tl.float32)
    else:
        own, own_ok = _heads_of_x(x, b, n, t_ok, h, H, D_HEAD, BLOCK_D)
        y = _weighted_sum(shares, x, own, own_ok, frames, F, BLOCK_D)
    _store_heads(out, y, t, t_ok, h, H, D_HEAD, BLOCK_D)


@triton.jit
def backward_queries_kernel(
    g,
    x,
    weight,
    attention,
    d_logits,
    d_q,
    scale,
    sizes,
    PROJECT: tl.constexpr,
    D_HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some tokens, some heads: the gradients e of the logits, and dq."""
    H, N, T, F = sizes
    D = H * D_HEAD
    groups = tl.cdiv(H, BLOCK_H)
    t, b, n, t_ok = _tokens(tl.program_id(0) // groups, BLOCK_T, N, T)
    h = tl.program_id(0) % groups * BLOCK_H + tl.arange(0, BLOCK_H)
    frames = tl.arange(0, BLOCK_F)
    grad = _load_heads(g, b, n, t_ok, h, H, D_HEAD, BLOCK_D)
    if PROJECT:
        d_shares = tl.zeros([BLOCK_H, BLOCK_T, BLOCK_F], tl.float32)
        for start in range(0, D, BLOCK_W):
            columns = start + tl.arange(0, BLOCK_W)
            w_v = _load_weight(weight, D, h, H, columns, D_HEAD, BLOCK_D)
            d_pooled = tl.dot(grad, w_v, input_precision=PRECISION)
            offsets, x_ok = _columns_of_x(x, b, n, t_ok, columns, D)
            d_shares += _products(d_pooled, x, offsets, x_ok, frames, F)
    else:
        own, own_ok = _heads_of_x(x, b, n, t_ok, h, H, D_HEAD, BLOCK_D)
        d_shares = _products(grad.to(tl.float32), x, own, own_ok, frames, F)
    at, ok = _attention_at(t, t_ok, h, frames, H, F, T)
    shares = tl.load(attention + at, mask=ok, other=0.0)
    e = shares * (d_shares - tl.sum(shares * d_shares, 2, keep_dims=True))
    tl.store(d_logits + at, e, mask=ok)

    d_queries = tl.zeros([BLOCK_H, BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_W):
        columns = start + tl.arange(0, BLOCK_W)
        offsets, x_ok = _columns_of_x(x, b, n, t_ok, columns, D)
        d_absorbed = _weighted_sum(e, x, offsets, x_ok, frames, F, BLOCK_W)
        w_k = _load_weight(weight, 0, h, H, columns, D_HEAD, BLOCK_D)
        w_k = tl.permute(w_k, (0, 2, 1))
        d_queries = tl.dot(d_absorbed.to(w_k.dtype), w_k, acc=d_queries, input_precision=PRECISION)
    _store_heads(d_q, d_queries * scale, t, t_ok, h, H, D_HEAD, BLOCK_D)


@triton.jit
def _of_all_heads(
    x,
    b,
    n,
    t_ok,
    weight,
    first_row,
    H,
    columns,
    D_HEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """W_h^T x_th for every head, some columns -> [tokens, heads, columns]."""
    h = tl.arange(0, BLOCK_H)
    T: tl.constexpr = b.shape[0]
    out = tl.zeros([BLOCK_H, T, columns.shape[0]], tl.float32)
    rows = b[None, :] * x[1] + n[None, :] * x[2] + h[:, None] * x[3]
    for start in range(0, D_HEAD, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        c_ok = (h < H)[:, None] & (c < D_HEAD)[None, :]
        ok = c_ok[:, None, :] & t_ok[None, :, None]
        tile = tl.load(x[0] + rows[:, :, None] + c[None, None, :], mask=ok, other=0.0)
        at = (first_row + h[:, None] * D_HEAD + c[None, :])[:, :, None] * (H * D_HEAD)
        ok = c_ok[:, :, None] & (columns < H * D_HEAD)[None, None, :]
        w = tl.load(weight + at + columns[None, None, :], mask=ok, other=0.0)
        out = tl.dot(tile, w, acc=out, input_precision=PRECISION)
    return tl.permute(out, (1, 0, 2))


@triton.jit
def _over_heads(weights, left, t, t_ok, frames, H, F, T, PRECISION: tl.constexpr):
    """sum_h weights_hf left_h: [h,F,T], [tokens, heads, columns] -> [tokens, frames, columns]."""
    h = tl.arange(0, left.shape[1])
    at = (h[None, None, :] * F + frames[None, :, None]).to(tl.int64) * T + t[:, None, None]
    ok = (h < H)[None, None, :] & (frames < F)[None, :, None] & t_ok[:, None, None]
    factors = tl.load(weights + at, mask=ok, other=0.0)
    return tl.dot(factors.to(left.dtype), left, input_precision=PRECISION)


@triton.jit
def backward_tokens_kernel(
    q,
    g,
    weight,
    attention,
    d_logits,
    d_x,
    scale,
    sizes,
    PROJECT: tl.constexpr,
    D_HEAD: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some tokens, some columns: dx of all frames, which is a sum over all heads."""
    H, N, T, F = sizes
    D = H * D_HEAD
    blocks = tl.cdiv(D, BLOCK_W)
    t, b, n, t_ok = _tokens(tl.program_id(0) // blocks, BLOCK_T, N, T)
    columns = tl.program_id(0) % blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    dtype: tl.constexpr = d_x[0].dtype.element_ty
    absorbed = _of_all_heads(
        q, b, n, t_ok, weight, 0, H, columns, D_HEAD, BLOCK_H, BLOCK_K, PRECISION
    )
    absorbed = (absorbed * scale).to(dtype)
    ok = t_ok[:, None] & (columns < D)[None, :]
    own_head = columns // D_HEAD
    own = b[:, None] * g[1] + n[:, None] * g[2]
    own += own_head[None, :] * g[3] + (columns % D_HEAD)[None, :]
    if PROJECT:
        d_pooled = _of_all_heads(
            g, b, n, t_ok, weight, D, H, columns, D_HEAD, BLOCK_H, BLOCK_K, PRECISION
        ).to(dtype)
    else:
        grad = tl.load(g[0] + own, mask=ok, other=0.0).to(tl.float32)
    for first in range(0, F, BLOCK_F):
        frames = first + tl.arange(0, BLOCK_F)
        every = ok[:, None, :] & (frames < F)[None, :, None]
        d_tokens = _over_heads(d_logits, absorbed, t, t_ok, frames, H, F, T, PRECISION)
        if PROJECT:
            d_tokens += _over_heads(attention, d_pooled, t, t_ok, frames, H, F, T, PRECISION)
        else:
            at = (own_head[None, None, :] * F + frames[None, :, None]).to(tl.int64) * T
            shares = tl.load(attention + at + t[:, None, None], mask=every, other=0.0)
            d_tokens += shares * grad[:, None, :]
        rows = b[:, None] * d_x[1] + frames[None, :].to(tl.int64) * d_x[2] + n[:, None] * d_x[3]
        at = d_x[0] + rows[:, :, None] + columns[None, None, :]
        tl.store(at, d_tokens.to(dtype), mask=every)


@triton.jit
def backward_weight_kernel(
    rows_of,
    x,
    factors,
    d_weight,
    scale,
    sizes,
    LENGTH: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    D_HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some heads, some columns, a part of the tokens: sum_t rows_th (sum_f factors_thf x_tf)^T.

    dW_k (FIRST_ROW 0) from the rows q and the factors e, dW_v (FIRST_ROW D) from g and a.
    LENGTH is the number of blocks of tokens of a part.
    """
    H, N, T, F = sizes
    D = H * D_HEAD
    groups, blocks = tl.cdiv(H, BLOCK_H), tl.cdiv(D, BLOCK_W)
    h = tl.program_id(0) % groups * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.program_id(0) // groups % blocks * BLOCK_W + tl.arange(0, BLOCK_W)
    part = tl.program_id(0) // (groups * blocks)
    total = tl.zeros([BLOCK_H, BLOCK_D, BLOCK_W], tl.float32)
    for step in range(LENGTH):
        t, b, n, t_ok = _tokens(part * LENGTH + step, BLOCK_T, N, T)
        rows = _load_heads(rows_of, b, n, t_ok, h, H, D_HEAD, BLOCK_D)
        offsets, x_ok = _columns_of_x(x, b, n, t_ok, columns, D)
        pooled = tl.zeros([BLOCK_H, BLOCK_T, BLOCK_W], tl.float32)
        x_f, factors_f = x[0], factors
        f_ok = (h < H)[:, None] & t_ok[None, :]
        f_at = h[:, None].to(tl.int64) * F * T + t[None, :]
        for _ in range(F):
            tokens = tl.load(x_f + offsets, mask=x_ok, other=0.0).to(tl.float32)
            weights = tl.load(factors_f + f_at, mask=f_ok, other=0.0)
            pooled += weights[:, :, None] * tokens
            x_f += x[2]
            factors_f += T
        rows = tl.permute(rows, (0, 2, 1))
        total = tl.dot(rows, pooled.to(rows.dtype), acc=total, input_precision=PRECISION)
    c = tl.arange(0, BLOCK_D)
    at = part.to(tl.int64) * d_weight[1] + FIRST_ROW * D
    ok = (h < H)[:, None] & (c < D_HEAD)[None, :]
    ok = ok[:, :, None] & (columns < D)[None, None, :]
    rows = (h[:, None] * D_HEAD + c[None, :])[:, :, None] * D + columns[None, None, :]
    tl.store(d_weight[0] + at + rows, total * scale, mask=ok)
