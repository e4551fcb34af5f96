"""What each sample sees of each frame (importance.py), in Triton: L_cf and M_cf.

    logit_cp = w_c.k_p - |k_p|^2/2,  L_c = log sum_p exp(logit_cp),  M_c = sum_p share_cp v_p

with share_cp = exp(logit_cp - L_c). A program goes through the keys of a frame once, with
a running maximum. Backward, with slope_c = dL_c - dM_c.M_c,

    dlogit_cp = share_cp (dM_c.v_p + slope_c),   dv_p = sum_c share_cp dM_c
    dk_p = sum_c dlogit_cp w_c - k_p sum_c dlogit_cp,   dw_c = sum_p dlogit_cp k_p

one kernel for the keys and one for the samples, so that each sum has one owner and one
order. Means and their gradients are in the precision of v; `rest` is what rounding took.

Large logits that are made anew differ by their rounding. A share well above a half is the
largest of its sample, which is kept: it needs no logit. Where it is 1, M_c is v_p and
dlogit_cp is dL_c, without a difference that is of rounding alone.

SAME: the keys are the values, and their gradient is the sum of both.

Without NORMS and VALUES, L_c is the log-sum of a landmark over all queries. Backward, the
kernel for the keys then takes a float32 gradient in place of `grad_v`, and adds to it.

Pointers are to k, v [B,h,F*P,d] with the strides given; all else is contiguous. `scale` is
d**-0.25: k is taken as it is, the samples w [B,h,C,d] are in the scaled space.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import (
    gradient_product,
    in_two,
    product,
    product_of_parts,
)


@triton.jit
def half_norms(k, scale):
    wide = k.to(tl.float32) * scale
    return tl.sum(wide * wide, 1) / 2


@triton.jit
def along_means(grad, means_ptr, rest_ptr, cells, ok):
    """dM_c.M_c, with what M_c lost by rounding: the difference to dM_c.v_p may be small."""
    means = tl.load(means_ptr + cells, mask=ok, other=0.0).to(tl.float32)
    if grad.dtype != tl.float32:
        means += tl.load(rest_ptr + cells, mask=ok, other=0.0).to(tl.float32)
    return tl.sum(grad.to(tl.float32) * means, 1)


@triton.jit
def seen_forward(
    w_ptr,
    k_ptr,
    v_ptr,
    log_sums_ptr,
    largest_ptr,
    means_ptr,
    rest_ptr,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    scale,
    H,
    F,
    P,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr,
    NORMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    f = pid // blocks % F
    bh = (pid // (blocks * F)).to(tl.int64)
    b, h = bh // H, bh % H
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    x = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_N)
    c_ok, x_ok = c < C, x < D
    cx_ok = c_ok[:, None] & x_ok[None, :]
    w = tl.load(w_ptr + (bh * C + c[:, None]) * D + x[None, :], mask=cx_ok, other=0.0) * scale
    high, low = in_two(w, k_ptr.dtype.element_ty)
    k_frame = k_ptr + b * k_batch + h * k_head + f.to(tl.int64) * P * k_token
    v_frame = v_ptr + b * v_batch + h * v_head + f.to(tl.int64) * P * v_token

    top = tl.full([BLOCK_C], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    seen = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for start in range(0, P, BLOCK_N):
        ok = start + rows < P
        nx_ok = ok[:, None] & x_ok[None, :]
        first = tl.cast(start, tl.int64)
        k = tl.load(
            k_frame + first * k_token + rows[:, None] * k_token + x[None, :], mask=nx_ok, other=0.0
        )
        logits = product_of_parts(high, low, tl.trans(k), PRECISION)
        if NORMS:
            logits -= half_norms(k, scale)[None, :]
        logits = tl.where(ok[None, :], logits, float("-inf"))
        # Finite from the first block on: there every sample sees a key.
        new = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp(logits - new[:, None])
        kept = tl.exp(top - new)
        total = total * kept + tl.sum(weights, 1)
        if VALUES:
            v = tl.load(
                v_frame + first * v_token + rows[:, None] * v_token + x[None, :],
                mask=nx_ok,
                other=0.0,
            )
            high_weights, low_weights = in_two(weights, v.dtype)
            seen = seen * kept[:, None]
            seen += product_of_parts(high_weights, low_weights, v, PRECISION)
        top = new
    at = (bh * F + f) * C + c
    tl.store(log_sums_ptr + at, top + tl.log(total), mask=c_ok)
    if VALUES:
        tl.store(largest_ptr + at, 1 / total, mask=c_ok)
        means, rest = in_two(seen / total[:, None], v_ptr.dtype.element_ty)
        cells = at[:, None] * D + x[None, :]
        tl.store(means_ptr + cells, means, mask=cx_ok)
        if v_ptr.dtype.element_ty != tl.float32:
            tl.store(rest_ptr + cells, rest, mask=cx_ok)


@triton.jit
def seen_backward_keys(
    w_ptr,
    k_ptr,
    v_ptr,
    log_sums_ptr,
    largest_ptr,
    means_ptr,
    rest_ptr,
    grad_log_sums_ptr,
    grad_means_ptr,
    grad_k_ptr,
    grad_v_ptr,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    scale,
    H,
    F,
    P,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr,
    SAME: tl.constexpr,
    NORMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(P, BLOCK_N)
    pid = tl.program_id(0)
    f = pid // blocks % F
    bh = (pid // (blocks * F)).to(tl.int64)
    b, h = bh // H, bh % H
    p = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_C)
    x = tl.arange(0, BLOCK_D)
    x_ok = x < D
    px_ok = (p < P)[:, None] & x_ok[None, :]
    token = (f * P + p).to(tl.int64)
    k = tl.load(
        k_ptr + b * k_batch + h * k_head + token[:, None] * k_token + x[None, :],
        mask=px_ok,
        other=0.0,
    )
    norms = half_norms(k, scale)
    if VALUES:
        v = tl.load(
            v_ptr + b * v_batch + h * v_head + token[:, None] * v_token + x[None, :],
            mask=px_ok,
            other=0.0,
        )
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_norms = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + columns
        c_ok = c < C
        cx_ok = c_ok[:, None] & x_ok[None, :]
        w = tl.load(w_ptr + (bh * C + c[:, None]) * D + x[None, :], mask=cx_ok, other=0.0) * scale
        high, low = in_two(w, k.dtype)
        logits = product(k, tl.trans(high), tl.trans(low), PRECISION)
        if NORMS:
            logits -= norms[:, None]
        logits = tl.where((p < P)[:, None], logits, float("-inf"))
        at = (bh * F + f) * C + c
        log_sums = tl.load(log_sums_ptr + at, mask=c_ok, other=float("inf"))
        shares = tl.exp(logits - log_sums[None, :])
        slope = tl.load(grad_log_sums_ptr + at, mask=c_ok, other=0.0)
        if VALUES:
            largest = tl.load(largest_ptr + at, mask=c_ok, other=0.0)
            shares = tl.where(shares > 0.6, largest[None, :], shares)
            cells = at[:, None] * D + x[None, :]
            grad_means = tl.load(grad_means_ptr + cells, mask=cx_ok, other=0.0)
            across = slope - along_means(grad_means, means_ptr, rest_ptr, cells, cx_ok)
            grad_v = tl.dot(shares.to(v.dtype), grad_means, acc=grad_v, input_precision=PRECISION)
            along = tl.dot(v, tl.trans(grad_means), input_precision=PRECISION)
            grad_logits = shares * (along + across[None, :])
            grad_logits = tl.where(shares == 1, slope[None, :], grad_logits)
        else:
            grad_logits = shares * slope[None, :]
        grad_k += gradient_product(grad_logits, high, not VALUES, PRECISION)
        if NORMS:
            grad_norms += tl.sum(grad_logits, 1)
    if NORMS:
        grad_k -= (grad_norms * scale * scale)[:, None] * k.to(tl.float32)
    cells = (bh * F * P + token[:, None]) * D + x[None, :]
    if not VALUES:
        grad_k += tl.load(grad_v_ptr + cells, mask=px_ok, other=0.0)
    if SAME:
        grad_k += grad_v
    tl.store(grad_k_ptr + cells, grad_k.to(grad_k_ptr.dtype.element_ty), mask=px_ok)
    if VALUES and not SAME:
        tl.store(grad_v_ptr + cells, grad_v.to(grad_v_ptr.dtype.element_ty), mask=px_ok)


@triton.jit
def seen_backward_samples(
    w_ptr,
    k_ptr,
    v_ptr,
    log_sums_ptr,
    largest_ptr,
    means_ptr,
    rest_ptr,
    grad_log_sums_ptr,
    grad_means_ptr,
    grad_w_ptr,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    scale,
    H,
    F,
    P,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    b, h = bh // H, bh % H
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    x = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_N)
    c_ok, x_ok = c < C, x < D
    cx_ok = c_ok[:, None] & x_ok[None, :]
    cells = (bh * C + c[:, None]) * D + x[None, :]
    w = tl.load(w_ptr + cells, mask=cx_ok, other=0.0) * scale
    high, low = in_two(w, k_ptr.dtype.element_ty)
    k_head_ptr = k_ptr + b * k_batch + h * k_head
    v_head_ptr = v_ptr + b * v_batch + h * v_head
    grad_w = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for f in range(F):
        at = (bh * F + f) * C + c
        log_sums = tl.load(log_sums_ptr + at, mask=c_ok, other=float("inf"))
        largest = tl.load(largest_ptr + at, mask=c_ok, other=0.0)[:, None]
        slope = tl.load(grad_log_sums_ptr + at, mask=c_ok, other=0.0)
        seen_cells = at[:, None] * D + x[None, :]
        grad_means = tl.load(grad_means_ptr + seen_cells, mask=cx_ok, other=0.0)
        across = slope - along_means(grad_means, means_ptr, rest_ptr, seen_cells, cx_ok)
        for start in range(0, P, BLOCK_N):
            ok = start + rows < P
            nx_ok = ok[:, None] & x_ok[None, :]
            first = tl.cast(f, tl.int64) * P + start
            k = tl.load(
                k_head_ptr + first * k_token + rows[:, None] * k_token + x[None, :],
                mask=nx_ok,
                other=0.0,
            )
            logits = product_of_parts(high, low, tl.trans(k), PRECISION)
            if NORMS:
                logits -= half_norms(k, scale)[None, :]
            # A key that is not there must not add to the sum over keys.
            logits = tl.where(ok[None, :], logits, float("-inf"))
            shares = tl.exp(logits - log_sums[:, None])
            shares = tl.where(shares > 0.6, largest, shares)
            v = tl.load(
                v_head_ptr + first * v_token + rows[:, None] * v_token + x[None, :],
                mask=nx_ok,
                other=0.0,
            )
            along = tl.dot(grad_means, tl.trans(v), input_precision=PRECISION)
            grad_logits = shares * (along + across[:, None])
            grad_logits = tl.where(shares == 1, slope[:, None], grad_logits)
            grad_w += gradient_product(grad_logits, k, False, PRECISION)
    tl.store(grad_w_ptr + cells, grad_w * scale, mask=cx_ok)
