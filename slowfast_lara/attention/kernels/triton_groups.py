"""Kernel `choose_groups` of `merged`: the groups of the keys of a frame, and their means.

With keys k_p, values v_p, the mean query r and the number `values` (see attention/merged.py):

    x_p = (k_p - mean_k) / std_k + values (v_p - mean_v) / std_v
    s_p = softmax of r.k_p / sqrt(d) over the keys of p's group

A program owns a frame. It chooses the centres in rounds, by the rules of `merged.choose_groups`,
and writes the group of each key and its weight s_p (`shares`), then the means of the groups
(triton_group_means.py). It computes x_p from k_p and v_p in each of its passes over the frame. The
nearness of p is the largest x_p.z - |z|^2/2 over the centres z. The nearness of a centre is
infinite, so that the centre is not chosen again and stays in its own group.

Threads exchange values through global memory, with a barrier between store and load. Tokens with
NaN are chosen last, so that every index is in range. k and v only need a last stride of 1; all
other tensors are contiguous.

Tuple arguments: `tokens` holds the pointers to the keys and values of the frame, and their strides.
`standard` holds mean_k, mean_v and the factors 1 / std_k and values / std_v.
"""

from __future__ import annotations

import triton
import triton.language as tl

from slowfast_lara.attention.kernels.triton_group_means import (
    MIN_LOG_WEIGHT,
    load_rows,
    mean_query,
    write_means,
)
from slowfast_lara.attention.kernels.triton_shared import own_block

TINY = tl.constexpr(2.0**-126)


@triton.jit
def frame_statistics(
    tokens, r, logits_ptr, values, scale, P,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the logits r.k_p / sqrt(d); return the largest logit and the tuple `standard`."""
    p_k, p_v, k_stride_n, v_stride_n = tokens
    i, mask_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D) < D
    mean_k = tl.zeros([BLOCK_D], tl.float32)
    mean_v = tl.zeros([BLOCK_D], tl.float32)
    top = float("-inf")
    for start in range(0, P, BLOCK_N):
        p = start + i
        b_k = load_rows(p_k, k_stride_n, p, p < P, D, BLOCK_D).to(tl.float32)
        mean_k += tl.sum(b_k, 0)
        mean_v += tl.sum(load_rows(p_v, v_stride_n, p, p < P, D, BLOCK_D).to(tl.float32), 0)
        logits = tl.sum(b_k * r[None, :], 1) * scale
        tl.store(logits_ptr + p, logits, mask=p < P)
        top = tl.maximum(top, tl.max(tl.where(p < P, logits, float("-inf")), 0))
    mean_k, mean_v = mean_k / P, mean_v / P
    square_k, square_v = 0.0, 0.0
    for start in range(0, P, BLOCK_N):
        p = start + i
        mask = (p < P)[:, None] & mask_d[None, :]
        b_k = load_rows(p_k, k_stride_n, p, p < P, D, BLOCK_D).to(tl.float32)
        b_v = load_rows(p_v, v_stride_n, p, p < P, D, BLOCK_D).to(tl.float32)
        b_k = tl.where(mask, b_k - mean_k[None, :], 0.0)
        b_v = tl.where(mask, b_v - mean_v[None, :], 0.0)
        square_k += tl.sum(tl.sum(b_k * b_k, 1), 0)
        square_v += tl.sum(tl.sum(b_v * b_v, 1), 0)
    factor_k = tl.rsqrt(tl.maximum(square_k / (P * D), TINY))
    factor_v = values * tl.rsqrt(tl.maximum(square_v / (P * D), TINY))
    return top, (mean_k, mean_v, factor_k, factor_v)


@triton.jit
def features(tokens, standard, rows, mask_rows, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """x_p of the tokens with indices `rows`, in the dtype of the keys; 0 where masked."""
    p_k, p_v, k_stride_n, v_stride_n = tokens
    mean_k, mean_v, factor_k, factor_v = standard
    b_k = load_rows(p_k, k_stride_n, rows, mask_rows, D, BLOCK_D)
    b_v = load_rows(p_v, v_stride_n, rows, mask_rows, D, BLOCK_D)
    x = (b_k.to(tl.float32) - mean_k[None, :]) * factor_k
    x += (b_v.to(tl.float32) - mean_v[None, :]) * factor_v
    return tl.where(mask_rows[:, None], x, 0.0).to(b_k.dtype)


@triton.jit
def first_centre(
    tokens, standard, norms_ptr, nearness_ptr, groups_ptr, P,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Choose the token closest to the mean as first centre; write norms, nearness and groups."""
    i = tl.arange(0, BLOCK_N)
    smallest, first = float("inf"), 0
    for start in range(0, P, BLOCK_N):
        p = start + i
        x = features(tokens, standard, p, p < P, D, BLOCK_D).to(tl.float32)
        norms = tl.sum(x * x, 1)
        tl.store(norms_ptr + p, norms, mask=p < P)
        norms = tl.where((p < P) & (norms == norms), norms, float("inf"))
        least, at = tl.min(norms, 0, return_indices=True)
        first = tl.where(least < smallest, start + at, first)
        smallest = tl.minimum(smallest, least)
    row = first + tl.zeros([1], tl.int32)
    z = features(tokens, standard, row, row < P, D, BLOCK_D).to(tl.float32)
    for start in range(0, P, BLOCK_N):
        p = start + i
        x = features(tokens, standard, p, p < P, D, BLOCK_D).to(tl.float32)
        nearness = tl.where(p == first, float("inf"), tl.sum(x * z, 1) - smallest / 2)
        tl.store(nearness_ptr + p, nearness, mask=p < P)
        tl.store(groups_ptr + p, tl.zeros([BLOCK_N], tl.int32), mask=p < P)


@triton.jit
def distances_from_centres(norms_ptr, nearness_ptr, p, mask):
    """Squared distance from the nearest centre; -inf for centres, masked tokens and NaN."""
    norms = tl.load(norms_ptr + p, mask=mask, other=0.0)
    distances = norms - 2 * tl.load(nearness_ptr + p, mask=mask, other=float("inf"))
    return tl.where(distances == distances, distances, float("-inf"))


@triton.jit
def farthest(norms_ptr, nearness_ptr, chosen_ptr, candidates, P, BLOCK_P: tl.constexpr):
    """Write the indices, in ascending order, of the `candidates` tokens farthest from the centres.

    A binary search over the bits of a float finds `least`, the smallest distance of these tokens.
    """
    p = tl.arange(0, BLOCK_P)
    distances = distances_from_centres(norms_ptr, nearness_ptr, p, p < P)
    # Integers with the same order as the distances; -0.0 counts as 0.0.
    bits = tl.where(distances == 0, 0.0, distances).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2**31
    keys = tl.where(p < P, keys, -1)
    least = tl.full((), 0, tl.int64)
    for i in range(32):
        trial = least + (tl.full((), 1, tl.int64) << (31 - i))
        number = tl.sum((keys >= trial).to(tl.int32), 0)
        least = tl.where(number >= candidates, trial, least)
    larger = (keys > least).to(tl.int32)
    equal = (keys == least).to(tl.int32)
    # Among tokens at the distance `least`, those with the lowest indices are chosen.
    fills = (tl.cumsum(equal, 0) <= candidates - tl.sum(larger, 0)).to(tl.int32)
    taken = larger + equal * fills
    tl.store(chosen_ptr + tl.cumsum(taken, 0) - 1, p, mask=taken == 1)


@triton.jit
def positions(x, i):
    """Position of each element of x in a descending sort; ties: lower i first."""
    larger = x[None, :] > x[:, None]
    equal = (x[None, :] == x[:, None]) & (i[None, :] < i[:, None])
    return tl.sum((larger | equal).to(tl.int32), 1)


@triton.jit
def far_apart(
    tokens, standard, norms_ptr, nearness_ptr, candidates_ptr, chosen_ptr, number, candidates,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the indices of the `number` best candidates (rule: `merged._far_apart`)."""
    j = tl.arange(0, BLOCK_R)
    mask_j = j < candidates
    rows = tl.load(candidates_ptr + j, mask=mask_j, other=0)
    x = features(tokens, standard, rows, mask_j, D, BLOCK_D)
    norms = tl.load(norms_ptr + rows, mask=mask_j, other=0.0)
    between = norms[:, None] + norms[None, :]
    between -= 2 * tl.dot(x, tl.trans(x), input_precision=PRECISION)
    distances = distances_from_centres(norms_ptr, nearness_ptr, rows, mask_j)
    order = positions(distances, j)
    between = tl.where(order[None, :] < order[:, None], between, float("inf"))
    distances = tl.minimum(distances, tl.min(between, 1))
    distances = tl.where(mask_j & (distances == distances), distances, float("-inf"))
    order = tl.where(candidates > number, positions(distances, order), order)
    tl.store(chosen_ptr + order, rows, mask=mask_j & (order < number))


@triton.jit
def join_nearest(
    tokens, standard, norms_ptr, nearness_ptr, groups_ptr, chosen_ptr, number, taken, P,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Z: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Move each token to its nearest new centre if all earlier centres are farther away.

    Then put each new centre into its own group.
    """
    i, c = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_Z)
    mask_c = c < number
    rows = tl.load(chosen_ptr + c, mask=mask_c, other=0)
    z = features(tokens, standard, rows, mask_c, D, BLOCK_D)
    half_norms = tl.load(norms_ptr + rows, mask=mask_c, other=float("inf")) / 2
    for start in range(0, P, BLOCK_N):
        p = start + i
        x = features(tokens, standard, p, p < P, D, BLOCK_D)
        scores = tl.dot(x, tl.trans(z), input_precision=PRECISION) - half_norms[None, :]
        scores, nearest = tl.max(scores, 1, return_indices=True)
        nearer = scores > tl.load(nearness_ptr + p, mask=p < P, other=float("inf"))
        tl.store(nearness_ptr + p, scores, mask=nearer)
        tl.store(groups_ptr + p, taken + nearest, mask=nearer)
    tl.debug_barrier()
    tl.store(nearness_ptr + rows, tl.full([BLOCK_Z], float("inf"), tl.float32), mask=mask_c)
    tl.store(groups_ptr + rows, taken + c, mask=mask_c)


@triton.jit
def write_shares(
    logits_ptr, groups_ptr, totals_ptr, top, P, C,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Replace the logits by their softmax over the keys of each group."""
    c, i = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_I)
    totals = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, P, BLOCK_I):
        j = start + i
        logits = tl.load(logits_ptr + j, mask=j < P, other=0.0) - top
        weights = tl.exp(tl.maximum(logits, MIN_LOG_WEIGHT))
        groups = tl.load(groups_ptr + j, mask=j < P, other=-1)
        totals += tl.sum(tl.where(groups[None, :] == c[:, None], weights[None, :], 0.0), 1)
    tl.store(totals_ptr + c, totals, mask=c < C)
    tl.debug_barrier()
    p = tl.arange(0, BLOCK_P)
    logits = tl.load(logits_ptr + p, mask=p < P, other=0.0) - top
    weights = tl.exp(tl.maximum(logits, MIN_LOG_WEIGHT))
    groups = tl.load(groups_ptr + p, mask=p < P, other=0)
    tl.store(logits_ptr + p, weights / tl.load(totals_ptr + groups), mask=p < P)


@triton.jit
def choose_groups(
    k_ptr, v_ptr, moments_ptr, groups_ptr, shares_ptr, kc_ptr, vc_ptr, biases_ptr, top_ptr,
    norms_ptr, nearness_ptr, chosen_ptr,
    k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n, scale, values,
    H, N, F, P, C, ROUNDS,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Z: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh, b, h, f, _ = own_block(1, F, H, 1)
    frame = bh * F + f
    p_k = k_ptr + b * k_stride_b + h * k_stride_h + f.to(tl.int64) * P * k_stride_n
    p_v = v_ptr + b * v_stride_b + h * v_stride_h + f.to(tl.int64) * P * v_stride_n
    tokens = (p_k, p_v, k_stride_n, v_stride_n)
    p_groups, p_shares = groups_ptr + frame * P, shares_ptr + frame * P
    p_norms, p_nearness = norms_ptr + frame * P, nearness_ptr + frame * P
    p_candidates = chosen_ptr + frame * (BLOCK_R + BLOCK_Z)
    p_chosen = p_candidates + BLOCK_R
    r, squares = mean_query(moments_ptr, bh, N, D, BLOCK_D)
    top, standard = frame_statistics(
        tokens, r, p_shares, values, scale, P, D, BLOCK_D, BLOCK_N
    )  # fmt: skip
    first_centre(tokens, standard, p_norms, p_nearness, p_groups, P, D, BLOCK_D, BLOCK_N)
    taken = 1
    for part in range(tl.minimum(ROUNDS, C - 1)):
        number = (C - 1) // ROUNDS + tl.where(part < (C - 1) % ROUNDS, 1, 0)
        candidates = tl.minimum(2 * number, P - taken)
        tl.debug_barrier()
        farthest(p_norms, p_nearness, p_candidates, candidates, P, BLOCK_P)
        tl.debug_barrier()
        far_apart(
            tokens, standard, p_norms, p_nearness, p_candidates, p_chosen, number, candidates,
            D, BLOCK_D, BLOCK_R, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()
        join_nearest(
            tokens, standard, p_norms, p_nearness, p_groups, p_chosen, number, taken, P,
            D, BLOCK_D, BLOCK_N, BLOCK_Z, PRECISION,
        )  # fmt: skip
        taken += number
    tl.debug_barrier()
    # write_shares reuses the buffer p_nearness for the sum of the weights of each group.
    write_shares(p_shares, p_groups, p_nearness, top, P, C, BLOCK_P, BLOCK_C, BLOCK_I)
    tl.debug_barrier()
    tl.store(top_ptr + frame, top)
    variance = tl.maximum(tl.sum(squares - r * r, 0), 0.0) / D
    p_kc, p_vc, p_biases = kc_ptr + frame * C * D, vc_ptr + frame * C * D, biases_ptr + frame * C
    for first in range(0, C, BLOCK_M):
        write_means(
            tokens, p_groups, p_shares, p_kc, p_vc, p_biases, standard[0], variance, first, P, C,
            D, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
