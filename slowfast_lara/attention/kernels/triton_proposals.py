"""LARA's Gaussian proposals and their weights (lara.py), in Triton, all in float32.

With s = d**-0.25, mu_c = s (q~_c + k~_c), w_c = mu_c + noise_c and

    l_cj = w_c.mu_j - |mu_j|^2/2,   own_c = l_cc,   balance_c = exp(l_cc - log sum_j exp(l_cj))

Backward, with y_c = balance_c dbalance_c and E_cj = -y_c exp(l_cj - own_c) balance_c, to which
down_c + y_c is added where j = c,

    dw_c += sum_j E_cj mu_j,   dmu_c = dw_c + sum_j E_jc (w_j - mu_c)

A program owns some proposals, as c in one sum and as j in the other, and goes through all.

Pointers are to contiguous [B,h,C,d] and [B,h,C].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_means(q_ptr, k_ptr, cells, ok, scale):
    q = tl.load(q_ptr + cells, mask=ok, other=0.0)
    return (q + tl.load(k_ptr + cells, mask=ok, other=0.0)) * scale


@triton.jit
def half_square(x):
    return tl.sum(x * x, 1) / 2


@triton.jit
def proposals_forward(
    q_ptr,
    k_ptr,
    noise_ptr,
    points_ptr,
    landmarks_ptr,
    own_ptr,
    balance_ptr,
    scale,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NOISE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    columns, x = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    c = pid % blocks * BLOCK_C + columns
    cells = (bh * C + c[:, None]) * D + x[None, :]
    ok = (c < C)[:, None] & (x < D)[None, :]
    landmarks = tl.load(q_ptr + cells, mask=ok, other=0.0) * scale
    means = load_means(q_ptr, k_ptr, cells, ok, scale)
    points = means
    if NOISE:
        points += tl.load(noise_ptr + cells, mask=ok, other=0.0)
    own = tl.sum(points * means, 1) - half_square(means)
    top, total = own, tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        j = start + columns
        j_ok = (j < C)[:, None] & (x < D)[None, :]
        others = load_means(q_ptr, k_ptr, (bh * C + j[:, None]) * D + x[None, :], j_ok, scale)
        logits = tl.dot(points, tl.trans(others), input_precision=PRECISION)
        logits -= half_square(others)[None, :]
        # The same number as `own`, and not one that was rounded otherwise: balance is at most 1.
        logits = tl.where(c[:, None] == j[None, :], own[:, None], logits)
        logits = tl.where((j < C)[None, :], logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(logits - new[:, None]), 1)
        top = new
    tl.store(points_ptr + cells, points, mask=ok)
    tl.store(landmarks_ptr + cells, landmarks, mask=ok)
    tl.store(own_ptr + bh * C + c, own, mask=c < C)
    tl.store(balance_ptr + bh * C + c, tl.exp(own - top - tl.log(total)), mask=c < C)


@triton.jit
def proposals_backward(
    q_ptr,
    k_ptr,
    points_ptr,
    own_ptr,
    balance_ptr,
    grad_points_ptr,
    grad_landmarks_ptr,
    grad_own_ptr,
    grad_balance_ptr,
    grad_q_ptr,
    grad_k_ptr,
    grad_noise_ptr,
    scale,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NOISE: tl.constexpr,
    LANDMARKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """LANDMARKS: there is a gradient of s q~_c. NOISE: that of the noise is written."""
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    columns, x = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    c = pid % blocks * BLOCK_C + columns
    at = bh * C + c
    cells = at[:, None] * D + x[None, :]
    c_ok = c < C
    ok = c_ok[:, None] & (x < D)[None, :]
    points = tl.load(points_ptr + cells, mask=ok, other=0.0)
    means = load_means(q_ptr, k_ptr, cells, ok, scale)
    half_squares = half_square(means)
    balance = tl.load(balance_ptr + at, mask=c_ok, other=0.0)
    own = tl.load(own_ptr + at, mask=c_ok, other=0.0)
    slope = balance * tl.load(grad_balance_ptr + at, mask=c_ok, other=0.0)
    grad_own = tl.load(grad_own_ptr + at, mask=c_ok, other=0.0)
    grad_points = tl.load(grad_points_ptr + cells, mask=ok, other=0.0) + grad_own[:, None] * means
    grad_means = grad_own[:, None] * (points - means)
    for start in range(0, C, BLOCK_C):
        j = start + columns
        j_at, j_ok = bh * C + j, j < C
        j_cells, jx_ok = j_at[:, None] * D + x[None, :], j_ok[:, None] & (x < D)[None, :]
        same = c[:, None] == j[None, :]
        other_means = load_means(q_ptr, k_ptr, j_cells, jx_ok, scale)
        logits = tl.dot(points, tl.trans(other_means), input_precision=PRECISION)
        logits -= half_square(other_means)[None, :]
        shares = tl.exp(logits - own[:, None] + tl.log(balance)[:, None])
        # A proposal's own share without what `slope` adds to it, before the products: large
        # vectors would not cancel.
        shares = tl.where(same, balance[:, None] - 1, shares)
        shares = tl.where(j_ok[None, :], shares, 0.0)
        grad_points -= tl.dot(slope[:, None] * shares, other_means, input_precision=PRECISION)

        other_points = tl.load(points_ptr + j_cells, mask=jx_ok, other=0.0)
        other_own = tl.load(own_ptr + j_at, mask=j_ok, other=0.0)
        other_balance = tl.load(balance_ptr + j_at, mask=j_ok, other=0.0)
        other_slope = other_balance * tl.load(grad_balance_ptr + j_at, mask=j_ok, other=0.0)
        logits = tl.dot(means, tl.trans(other_points), input_precision=PRECISION)
        logits -= half_squares[:, None]
        # A proposal that is not there has a balance of 0, and the logarithm takes it away.
        shares = tl.exp(logits - other_own[None, :] + tl.log(other_balance)[None, :])
        shares = tl.where(same, balance[:, None] - 1, shares)
        weights = shares * other_slope[None, :]
        grad_means -= tl.dot(weights, other_points, input_precision=PRECISION)
        grad_means += tl.sum(weights, 1)[:, None] * means
    if NOISE:
        tl.store(grad_noise_ptr + cells, grad_points, mask=ok)
    grad_means = (grad_means + grad_points) * scale
    tl.store(grad_k_ptr + cells, grad_means, mask=ok)
    if LANDMARKS:
        grad_means += tl.load(grad_landmarks_ptr + cells, mask=ok, other=0.0) * scale
    tl.store(grad_q_ptr + cells, grad_means, mask=ok)
