"""Memory traffic and FLOPs of each Triton kernel, derived from its algorithm.

A FLOP counter treats a fused kernel as one opaque operator. The functions of this module return the
bytes that each kernel reads and writes, and its FLOPs. They need neither Triton nor a GPU.

The bytes of a tensor count once for each pass of a kernel over the tensor. Programs that read the
same tile are neighbours in the grid, so only the first one reads it from memory; the others find it
in the L2 cache. A second pass of a program over the keys of its frame also reads the L2 cache.

In half precision, matmuls with the samples and landmarks run twice: once with the rounded value and
once with the remainder that rounding removed (`_split_matmuls`). Padding of tiles is not counted.

Shapes: B batch, h heads, T tokens, N queries, F frames, P tokens of a frame, C samples or
landmarks, d head size, D = h*d. `size` is the bytes of an element of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from slowfast_lara.attention.kernels.tiles import (
    FRAME_GROUP,
    QUERY_PARTS,
    frames_of_part,
    queries_of_part,
    weight_gradient_parts,
)

FLOAT32 = 4


class Launch(NamedTuple):
    """One kernel launch: bytes of memory traffic, and floating-point operations."""

    kernel: str
    bytes: int
    flops: int


def _split_matmuls(size: int) -> int:
    return 1 if size == FLOAT32 else 2


def _query_parts(kernel: str, B: int, h: int, N: int, C: int, d: int, size: int) -> int:
    return -(-N // queries_of_part(kernel, N, B * h, element_size=size, d=d, C=C))


def _sum_of_parts(parts: int, moved: int) -> list[Launch]:
    """PyTorch's sum of float32 parts of `moved` bytes each; a single part needs none."""
    launch = Launch("sum of parts", (parts + 1) * moved, parts * moved // FLOAT32)
    return [launch] if parts > 1 and moved else []


def landmarks_forward(
    B: int, h: int, T: int, C: int, d: int, size: int, farthest: bool
) -> list[Launch]:
    """One pass over the tokens for the means; with `farthest`, another for the farthest tokens."""
    tokens, landmarks = B * h * T * d, B * h * C * d * FLOAT32
    sums = Launch("segment_sums", tokens * size + landmarks, tokens)
    if not farthest:
        return [sums]
    mean = Launch("mean", landmarks + landmarks // C, landmarks // FLOAT32)
    chosen = tokens * size + 2 * landmarks + landmarks // C + B * h * C * 4
    return [sums, mean, Launch("farthest_of_segment", chosen, 3 * tokens)]


def landmarks_backward(
    B: int, h: int, T: int, C: int, d: int, size: int, farthest: bool
) -> list[Launch]:
    moved = B * h * (T * d * size + C * d * FLOAT32 + farthest * C * 4)
    return [Launch("segment_backward", moved, B * h * C * d)]


def proposals_forward(B: int, h: int, C: int, d: int, noise: bool) -> list[Launch]:
    """Reads landmarks and noise; writes samples, scaled landmarks and two weights per sample."""
    moved = B * h * C * (d * (4 + noise) + 2) * FLOAT32
    return [Launch("proposals_forward", moved, 2 * B * h * C * C * d)]


def proposals_backward(B: int, h: int, C: int, d: int, noise: bool, aligned: bool) -> list[Launch]:
    """Recomputes the [C,C] densities twice: for the sums over rows and over columns."""
    moved = B * h * C * (d * (6 + noise + aligned) + 4) * FLOAT32
    return [Launch("proposals_backward", moved, 4 * 2 * B * h * C * C * d)]


def key_stats_forward(
    B: int, h: int, F: int, P: int, C: int, d: int, size: int, values: bool
) -> list[Launch]:
    """Writes log-sums, largest weights and means; in half precision also the means' remainders.

    If `values` is false, the keys are also the values.
    """
    keys, statistics = B * h * F * P * d * size, B * h * F * C
    written = statistics * (d * size * _split_matmuls(size) + 2 * FLOAT32)
    matmul_flops = 2 * B * h * F * P * C * d
    moved = (1 + values) * keys + B * h * C * d * FLOAT32 + written
    return [Launch("key_stats_forward", moved, matmul_flops * 2 * _split_matmuls(size))]


def key_stats_backward(
    B: int, h: int, F: int, P: int, C: int, d: int, size: int, values: bool
) -> list[Launch]:
    """One kernel for keys and values, one for the samples; both recompute the softmax weights.

    The second writes a gradient of the samples for each part of the frames.
    """
    keys, statistics = (1 + values) * B * h * F * P * d * size, B * h * F * C
    samples = B * h * C * d * FLOAT32
    read = keys + samples + statistics * (d * size * (1 + _split_matmuls(size)) + 3 * FLOAT32)
    matmul_flops, recomputed = 2 * B * h * F * P * C * d, _split_matmuls(size) + 1
    kernel = "key_stats_backward_samples"
    parts = -(-F // frames_of_part(kernel, F, B * h, element_size=size, d=d, C=C))
    return [
        Launch("key_stats_backward_keys", read + keys, matmul_flops * (recomputed + 2)),
        Launch(kernel, read + parts * samples, matmul_flops * (recomputed + 1)),
        *_sum_of_parts(parts, samples),
    ]


def combine_forward(
    B: int, h: int, N: int, F: int, C: int, d: int, size: int, aligned: bool
) -> list[Launch]:
    """One kernel for the estimate; if `aligned`, another computes the query normaliser first."""
    queries, landmarks = B * h * N * d * size, B * h * C * FLOAT32
    matmul_flops, scores = 2 * B * h * N * C * d, _split_matmuls(size) * (1 + aligned)
    moved = queries * (1 + F) + B * h * F * C * (d * size + FLOAT32) + landmarks * d
    launches = [Launch("combine_forward", moved, matmul_flops * (scores + F))]
    if aligned:
        launches[0] = launches[0]._replace(bytes=moved + landmarks * (d + 4))
        parts = _query_parts("query_normaliser", B, h, N, C, d, size)
        moved = queries + landmarks * (d + parts)
        sums = [Launch("query_normaliser", moved, matmul_flops * _split_matmuls(size))]
        if parts > 1:  # logcumsumexp over the parts, and a copy of its last element
            total = parts * landmarks
            sums.append(Launch("logcumsumexp", 2 * total, total // FLOAT32))
            sums.append(Launch("copy", 2 * landmarks, landmarks // FLOAT32))
        launches = sums + launches
    return launches


def combine_backward(
    B: int, h: int, N: int, F: int, C: int, d: int, size: int, aligned: bool
) -> list[Launch]:
    """The first kernel writes the gradient of q, and query statistics for the other kernels."""
    elements, landmarks = B * h * N * d, B * h * C * FLOAT32
    means, log_sums = B * h * F * C * d * size, B * h * F * C * FLOAT32
    query_stats = B * h * N * (3 * F + 2) * FLOAT32
    # Partial sums of R_c (see triton_combine.py), one for each block of 32 queries. The smaller
    # blocks of 16 queries for float32, d > 64 or C > 128 are ignored here.
    blocks = -(-N // 32)
    sample_inputs = landmarks * d * (1 + aligned) + 4 * aligned * landmarks
    matmul_flops, scores = 2 * B * h * N * C * d, _split_matmuls(size) * (1 + aligned)
    read = elements * size * (1 + F) + sample_inputs + means + log_sums
    grad_q = elements * (FLOAT32 if aligned else size)
    dq_matmuls = 1 + aligned * _split_matmuls(size)
    groups = -(-F // FRAME_GROUP)
    parts = _query_parts("combine_backward_samples", B, h, N, C, d, size)
    gradients = [landmarks * d, log_sums, *[landmarks * d, 3 * landmarks] * aligned]
    launches = [
        Launch(
            "combine_backward_queries",
            read + grad_q + query_stats + aligned * blocks * landmarks,
            matmul_flops * (scores + F + dq_matmuls),
        ),
        *_sum_of_parts(blocks, aligned * landmarks),
        Launch(
            "combine_backward_samples",
            read + query_stats + parts * sum(gradients),
            matmul_flops * (scores + F + 1 + aligned),
        ),
        *(launch for moved in gradients for launch in _sum_of_parts(parts, moved)),
        Launch("combine_backward_means", read + query_stats, matmul_flops * (groups * scores + F)),
    ]
    if aligned:
        moved = 2 * elements * size + grad_q + landmarks * (d + 2)
        launches.append(
            Launch("query_normaliser_backward", moved, matmul_flops * 2 * _split_matmuls(size))
        )
    return launches


def temporal_forward(
    B: int, N: int, F: int, h: int, d: int, size: int, project_values: bool
) -> list[Launch]:
    """The first kernel reads x and writes the attention weights; the second reads both."""
    scores = _temporal_scores(B, N, F, h, d, size, projected=True, twice=size != FLOAT32)
    if project_values:
        return [scores, _temporal_pool(B, N, F, h, d, size)]
    D, attention = h * d, B * N * h * F * FLOAT32
    values = Launch("temporal_sum", B * N * D * size * (F + 1) + attention, 2 * B * N * F * D)
    return [scores, values]


def temporal_backward(
    B: int, N: int, F: int, h: int, d: int, size: int, project_values: bool
) -> list[Launch]:
    """Kernels for the gradients of attention weights, x, q, and the projection weights, in order.

    The kernel for x recomputes the absorbed queries (triton_temporal.py) in each tile of 16 frames.
    """
    D, tokens, projections = h * d, B * N, 1 + project_values
    token_bytes, attention = tokens * D * size, tokens * h * F * FLOAT32
    scores = _temporal_scores(B, N, F, h, d, size, projected=project_values, twice=False)
    scores = scores._replace(bytes=scores.bytes + attention)
    projection_flops, frame_flops = 2 * tokens * D * D, 2 * tokens * h * F * D
    tokens_moved = token_bytes * (2 + F) + 2 * attention + projections * D * D * size
    parts = weight_gradient_parts(tokens) * D * D * FLOAT32
    moved = token_bytes * (1 + F) + attention + parts
    weight = [
        Launch("temporal_backward_weight", moved, projection_flops + frame_flops),
        Launch("sum of parts", parts + D * D * (2 * FLOAT32 + size), parts // FLOAT32),
    ]
    return [
        scores,
        Launch(
            "temporal_backward_tokens",
            tokens_moved,
            -(-F // 16) * projections * projection_flops + 2 * frame_flops,
        ),
        _temporal_pool(B, N, F, h, d, size),
        *weight * projections,
    ]


def _temporal_scores(
    B: int, N: int, F: int, h: int, d: int, size: int, projected: bool, twice: bool
) -> Launch:
    D, tokens = h * d, B * N
    moved = tokens * D * size * (1 + F) + tokens * h * F * FLOAT32 + projected * D * D * size
    flops = projected * 2 * tokens * D * D + (1 + twice) * 2 * tokens * h * F * D
    return Launch("temporal_scores", moved, flops)


def _temporal_pool(B: int, N: int, F: int, h: int, d: int, size: int) -> Launch:
    D, tokens = h * d, B * N
    moved = tokens * D * size * (1 + F) + tokens * h * F * FLOAT32 + D * D * size
    return Launch("temporal_pool", moved, 2 * tokens * D * D + 2 * tokens * h * F * D)


def merged_forward(
    B: int, h: int, N: int, F: int, P: int, m: int, d: int, size: int, rounds: int
) -> list[Launch]:
    """Three kernels: moments of the queries; groups of the keys and their means; attention."""
    queries, keys = B * h * N * d * size, 2 * B * h * F * P * d * size
    groups = B * h * F * m * (2 * d * size + FLOAT32)
    moments = B * h * QUERY_PARTS * 2 * d * FLOAT32
    # Four numbers per key (norm, nearness, group and share; see triton_groups.py) are written to
    # memory once, and then read from the cache.
    chosen = keys + moments + 4 * B * h * F * P * FLOAT32 + groups
    # FLOPs of three steps: distances of the keys from the m centres; in each round, distances
    # between the 2 m / rounds candidates; means of keys and values.
    flops = 2 * B * h * F * d * (P * m + 4 * m * m // rounds + 2 * _split_matmuls(size) * P * m)
    return [
        Launch("query_moments", queries + moments, 3 * B * h * N * d),
        Launch("choose_groups", chosen, flops),
        Launch("attend_forward", queries * (1 + F) + groups, 2 * 2 * B * h * F * N * m * d),
    ]


def merged_backward(
    B: int, h: int, N: int, F: int, P: int, m: int, d: int, size: int
) -> list[Launch]:
    """Three kernels: gradients of the means of the groups, of keys and values, and of the queries.

    The first and the last kernel recompute the attention weights.
    """
    queries, keys, means = B * h * N * d * size, 2 * B * h * F * P * d * size, B * h * F * d
    groups = B * h * F * m * (2 * d * size + FLOAT32)
    read, matmul_flops = queries * (1 + F) + groups, 2 * B * h * F * N * m * d
    # The scratch tensor t_p (see triton_group_means.py) is written; groups and shares are read.
    keys_moved = 2 * keys + groups + 3 * B * h * F * P * FLOAT32 + means * FLOAT32
    passes = 2 if d > 64 else 1  # a program computes 64 components
    return [
        Launch("attend_backward_groups", read + groups, matmul_flops * (2 + 2 * passes)),
        Launch("group_means_backward", keys_moved, 8 * means * P),
        Launch("attend_backward_queries", read + queries + means * FLOAT32, 3 * matmul_flops),
    ]


# The functions below have the signatures of the operators. They accept meta tensors.


def _landmarks_traffic(x: Tensor, number: int, num_frames: int, farthest: bool) -> list[Launch]:
    B, h, T, d = x.shape
    return landmarks_forward(B, h, T, number, d, x.element_size(), farthest)


def _landmarks_backward_traffic(
    x: Tensor, chosen: Tensor, num_frames: int, grad: Tensor
) -> list[Launch]:
    (B, h, T, d), farthest = x.shape, chosen.numel() > 0
    return landmarks_backward(B, h, T, grad.shape[2], d, x.element_size(), farthest)


def _proposals_traffic(q_landmarks: Tensor, k_landmarks: Tensor, noise: Any) -> list[Launch]:
    B, h, C, d = q_landmarks.shape
    return proposals_forward(B, h, C, d, noise is not None)


def _proposals_backward_traffic(q_landmarks: Tensor, *more: Any) -> list[Launch]:
    with_noise, _, grad_landmarks = more[4:7]
    B, h, C, d = q_landmarks.shape
    return proposals_backward(B, h, C, d, with_noise, grad_landmarks is not None)


def _key_stats_traffic(launches: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
    def traffic(samples: Tensor, k: Tensor, v: Tensor | None, num_frames: int, *more: Any):
        (B, h, keys, d), C, values = k.shape, samples.shape[2], v is not None
        return launches(B, h, num_frames, keys // num_frames, C, d, k.element_size(), values)

    return traffic


def _combine_traffic(launches: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
    def traffic(q: Tensor, samples: Tensor, log_sums: Tensor, means: Tensor, *more: Any):
        (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
        return launches(B, h, N, F, C, d, q.element_size(), aligned=more[0] is not None)

    return traffic


def _temporal_traffic(launches: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
    def traffic(q: Tensor, x: Tensor, weight: Tensor, bias: Any, project_values: bool, *more: Any):
        (B, N, h, d), F = q.shape, x.shape[1]
        return launches(B, N, F, h, d, q.element_size(), project_values)

    return traffic


def _merged_traffic(
    q: Tensor, k: Tensor, v: Tensor, num_frames: int, num_groups: int, rounds: int, values: float
) -> list[Launch]:
    (B, h, N, d), P = q.shape, k.shape[2] // num_frames
    return merged_forward(B, h, N, num_frames, P, num_groups, d, q.element_size(), rounds)


def _merged_backward_traffic(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor, shares: Tensor, kc: Tensor, *more: Any
) -> list[Launch]:
    (B, h, N, d), (F, P), m = q.shape, groups.shape[2:], kc.shape[3]
    return merged_backward(B, h, N, F, P, m, d, q.element_size())


OPERATORS: dict[str, Callable[..., list[Launch]]] = {
    "slowfast_lara::landmarks": _landmarks_traffic,
    "slowfast_lara::landmarks_backward": _landmarks_backward_traffic,
    "slowfast_lara::proposals": _proposals_traffic,
    "slowfast_lara::proposals_backward": _proposals_backward_traffic,
    "slowfast_lara::key_stats": _key_stats_traffic(key_stats_forward),
    "slowfast_lara::key_stats_backward": _key_stats_traffic(key_stats_backward),
    "slowfast_lara::combine": _combine_traffic(combine_forward),
    "slowfast_lara::combine_backward": _combine_traffic(combine_backward),
    "slowfast_lara::merged": _merged_traffic,
    "slowfast_lara::merged_backward": _merged_backward_traffic,
    "slowfast_lara::temporal": _temporal_traffic(temporal_forward),
    "slowfast_lara::temporal_backward": _temporal_traffic(temporal_backward),
}
