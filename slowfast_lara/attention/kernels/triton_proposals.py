"""Kernels of `proposals`: LARA's Gaussian proposals and their densities, in float32.

With mu_c = scale (q~_c + k~_c), w_c = mu_c + noise_c and the densities q_j = N(mu_j, I), the
log-densities l_cj = log(q_j(w_c) / N(w_c;0,I)) are

    l_cj = w_c.mu_j - |mu_j|^2/2,   log_own_c = l_cc,   balance_c = exp(l_cc - log sum_j exp(l_cj))

In the backward pass, with y_c = balance_c dbalance_c and the gradient E_cj of l_cj,

    E_cj = -y_c exp(l_cj - log_own_c) balance_c  (+ dlog_own_c + y_c if j = c),

    dw_c += sum_j E_cj mu_j,   dmu_c = dw_c + sum_j E_jc (w_j - mu_c)

A program owns a block of proposals c and loops over all proposals j.
All tensors are contiguous, [B,h,C,d] or [B,h,C].
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_shared import own_block


@triton.jit
def load_mu(q_ptr, k_ptr, cd, mask, scale):
    b_q = tl.load(q_ptr + cd, mask=mask, other=0.0)
    return (b_q + tl.load(k_ptr + cd, mask=mask, other=0.0)) * scale


@triton.jit
def half_norm(x):
    return tl.sum(x * x, 1) / 2


@triton.jit
def proposals_forward(
    q_ptr, k_ptr, noise_ptr, w_ptr, landmarks_ptr, log_own_ptr, balance_ptr, scale, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    NOISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write w, scale * q~ (`landmarks_ptr`), log_own and balance of a block of proposals."""
    bh, _, _, _, c = own_block(C, 1, 1, BLOCK_C)
    i, d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    cd = (bh * C + c[:, None]) * D + d[None, :]
    mask = (c < C)[:, None] & (d < D)[None, :]
    landmarks = tl.load(q_ptr + cd, mask=mask, other=0.0) * scale
    b_mu = load_mu(q_ptr, k_ptr, cd, mask, scale)
    b_w = b_mu
    if NOISE:
        b_w += tl.load(noise_ptr + cd, mask=mask, other=0.0)
    log_own = tl.sum(b_w * b_mu, 1) - half_norm(b_mu)
    top, total = log_own, tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        j = start + i
        mask_jd = (j < C)[:, None] & (d < D)[None, :]
        mu_j = load_mu(q_ptr, k_ptr, (bh * C + j[:, None]) * D + d[None, :], mask_jd, scale)
        logits = tl.dot(b_w, tl.trans(mu_j), input_precision=PRECISION)
        logits -= half_norm(mu_j)[None, :]
        # Set l_cc to exactly log_own, without the matmul's rounding, so that balance is at most 1.
        logits = tl.where(c[:, None] == j[None, :], log_own[:, None], logits)
        logits = tl.where((j < C)[None, :], logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(logits - new[:, None]), 1)
        top = new
    tl.store(w_ptr + cd, b_w, mask=mask)
    tl.store(landmarks_ptr + cd, landmarks, mask=mask)
    tl.store(log_own_ptr + bh * C + c, log_own, mask=c < C)
    tl.store(balance_ptr + bh * C + c, tl.exp(log_own - top - tl.log(total)), mask=c < C)


@triton.jit
def proposals_backward(
    q_ptr, k_ptr, w_ptr, log_own_ptr, balance_ptr, dw_ptr, dlandmarks_ptr, dlog_own_ptr,
    dbalance_ptr, dq_ptr, dk_ptr, dnoise_ptr, scale, C,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
    NOISE: tl.constexpr, LANDMARKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the landmarks of a block of proposals, and of the noise if NOISE.

    LANDMARKS: the output scale * q~ has a gradient, dlandmarks.
    """
    bh, _, _, _, c = own_block(C, 1, 1, BLOCK_C)
    i, d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    bhc = bh * C + c
    cd = bhc[:, None] * D + d[None, :]
    mask_c = c < C
    mask = mask_c[:, None] & (d < D)[None, :]
    b_w = tl.load(w_ptr + cd, mask=mask, other=0.0)
    b_mu = load_mu(q_ptr, k_ptr, cd, mask, scale)
    half_norms = half_norm(b_mu)
    balance = tl.load(balance_ptr + bhc, mask=mask_c, other=0.0)
    log_own = tl.load(log_own_ptr + bhc, mask=mask_c, other=0.0)
    y = balance * tl.load(dbalance_ptr + bhc, mask=mask_c, other=0.0)
    dlog_own = tl.load(dlog_own_ptr + bhc, mask=mask_c, other=0.0)
    b_dw = tl.load(dw_ptr + cd, mask=mask, other=0.0) + dlog_own[:, None] * b_mu
    b_dmu = dlog_own[:, None] * (b_w - b_mu)
    for start in range(0, C, BLOCK_C):
        j = start + i
        bhj, mask_j = bh * C + j, j < C
        jd, mask_jd = bhj[:, None] * D + d[None, :], mask_j[:, None] & (d < D)[None, :]
        same = c[:, None] == j[None, :]
        mu_j = load_mu(q_ptr, k_ptr, jd, mask_jd, scale)
        logits = tl.dot(b_w, tl.trans(mu_j), input_precision=PRECISION)
        logits -= half_norm(mu_j)[None, :]
        shares = tl.exp(logits - log_own[:, None] + tl.log(balance)[:, None])
        # Add y_c to E_cc before the matmul, so that large vectors cancel exactly.
        shares = tl.where(same, balance[:, None] - 1, shares)
        shares = tl.where(mask_j[None, :], shares, 0.0)
        b_dw -= tl.dot(y[:, None] * shares, mu_j, input_precision=PRECISION)

        w_j = tl.load(w_ptr + jd, mask=mask_jd, other=0.0)
        log_own_j = tl.load(log_own_ptr + bhj, mask=mask_j, other=0.0)
        balance_j = tl.load(balance_ptr + bhj, mask=mask_j, other=0.0)
        y_j = balance_j * tl.load(dbalance_ptr + bhj, mask=mask_j, other=0.0)
        logits = tl.dot(b_mu, tl.trans(w_j), input_precision=PRECISION)
        logits -= half_norms[:, None]
        # Out-of-range proposals j have balance 0, so the exponential is exp(-inf) = 0.
        shares = tl.exp(logits - log_own_j[None, :] + tl.log(balance_j)[None, :])
        shares = tl.where(same, balance[:, None] - 1, shares)
        weights = shares * y_j[None, :]
        b_dmu -= tl.dot(weights, w_j, input_precision=PRECISION)
        b_dmu += tl.sum(weights, 1)[:, None] * b_mu
    if NOISE:
        tl.store(dnoise_ptr + cd, b_dw, mask=mask)
    b_dmu = (b_dmu + b_dw) * scale
    tl.store(dk_ptr + cd, b_dmu, mask=mask)
    if LANDMARKS:
        b_dmu += tl.load(dlandmarks_ptr + cd, mask=mask, other=0.0) * scale
    tl.store(dq_ptr + cd, b_dmu, mask=mask)
