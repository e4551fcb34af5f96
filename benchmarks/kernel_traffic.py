"""What each kernel moves and computes, told by the algorithm beside which it stands.

A fused kernel is one operator to a counter of operations, which cannot look inside. So
each one states here which tensors it reads and writes and how many products it makes.
Nothing here needs Triton or a GPU.

A tensor counts once for each time that a kernel goes through it. Programs that share a
tile are neighbours in the grid, so that the second of them finds it in the L2 cache.

Half precision makes products with the samples and landmarks twice, with their rounded
value and with the rest: `_products` says how often. Tiles are counted without padding.

Shapes: B batch, h heads, N queries, F frames, P tokens of a frame, C samples or landmarks,
d head size; `size` is the bytes of an element of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from slowfast_lara.attention.kernels.tiles import FRAME_GROUP, temporal_weight_parts

FLOAT32 = 4


class Launch(NamedTuple):
    """One kernel: bytes to and from memory, and floating-point operations."""

    kernel: str
    bytes: int
    flops: int


def _products(size: int) -> int:
    return 1 if size == FLOAT32 else 2


def landmarks_forward(
    B: int, h: int, T: int, C: int, d: int, size: int, farthest: bool
) -> list[Launch]:
    """One pass over the T tokens for the means; another for what is farthest from them."""
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
    return [Launch("spread_over_segments", moved, B * h * C * d)]


def proposals_forward(B: int, h: int, C: int, d: int, noise: bool) -> list[Launch]:
    """Landmarks and noise in, samples, scaled landmarks and two numbers of each out."""
    moved = B * h * C * (d * (4 + noise) + 2) * FLOAT32
    return [Launch("proposals_forward", moved, 2 * B * h * C * C * d)]


def proposals_backward(B: int, h: int, C: int, d: int, noise: bool, favoured: bool) -> list[Launch]:
    """The densities are made anew twice, by rows and by columns."""
    moved = B * h * C * (d * (6 + noise + favoured) + 4) * FLOAT32
    return [Launch("proposals_backward", moved, 4 * 2 * B * h * C * C * d)]


def seen_forward(
    B: int, h: int, F: int, P: int, C: int, d: int, size: int, values: bool
) -> list[Launch]:
    """What each sample sees of each frame; half precision keeps what rounding took, too.

    Without `values` they are the keys.
    """
    keys, statistics = B * h * F * P * d * size, B * h * F * C
    kept = statistics * (d * size * _products(size) + 2 * FLOAT32)
    product = 2 * B * h * F * P * C * d
    moved = (1 + values) * keys + B * h * C * d * FLOAT32 + kept
    return [Launch("seen_forward", moved, product * 2 * _products(size))]


def seen_backward(
    B: int, h: int, F: int, P: int, C: int, d: int, size: int, values: bool
) -> list[Launch]:
    """One kernel for the keys and values, one for the samples; each makes the shares anew."""
    keys, statistics = (1 + values) * B * h * F * P * d * size, B * h * F * C
    samples = B * h * C * d * FLOAT32
    read = keys + samples + statistics * (d * size * (1 + _products(size)) + 3 * FLOAT32)
    product, again = 2 * B * h * F * P * C * d, _products(size) + 1
    return [
        Launch("seen_backward_keys", read + keys, product * (again + 2)),
        Launch("seen_backward_samples", read + samples, product * (again + 1)),
    ]


def mix_forward(
    B: int, h: int, N: int, F: int, C: int, d: int, size: int, favoured: bool
) -> list[Launch]:
    """The estimate itself; `favoured`: after the landmarks' log-sums over all queries."""
    queries, landmarks = B * h * N * d * size, B * h * C * FLOAT32
    product, scores = 2 * B * h * N * C * d, _products(size) * (1 + favoured)
    moved = queries * (1 + F) + B * h * F * C * (d * size + FLOAT32) + landmarks * d
    launches = [Launch("mix_forward", moved, product * (scores + F))]
    if favoured:
        launches[0] = launches[0]._replace(bytes=moved + landmarks * (d + 4))
        sums = Launch("column_sums", queries + landmarks * (d + 1), product * _products(size))
        launches.insert(0, sums)
    return launches


def mix_backward(
    B: int, h: int, N: int, F: int, C: int, d: int, size: int, favoured: bool
) -> list[Launch]:
    """The queries' gradients first, with numbers of each query that the rest reads."""
    elements, landmarks = B * h * N * d, B * h * C * FLOAT32
    seen, log_sums = B * h * F * C * d * size, B * h * F * C * FLOAT32
    rows = B * h * N * (3 * F + 2) * FLOAT32
    # What each block of 32 queries adds to R_c.
    parts = favoured * -(-N // 32) * landmarks
    small = landmarks * d * (1 + favoured) + 4 * favoured * landmarks
    product, scores = 2 * B * h * N * C * d, _products(size) * (1 + favoured)
    read = elements * size * (1 + F) + small + seen + log_sums
    grad_q = elements * (FLOAT32 if favoured else size)
    pulls = 1 + favoured * _products(size)
    groups = -(-F // FRAME_GROUP)
    launches = [
        Launch(
            "mix_backward_queries", read + grad_q + rows + parts, product * (scores + F + pulls)
        ),
        Launch(
            "mix_backward_samples",
            read + rows + small + log_sums,
            product * (scores + F + 1 + favoured),
        ),
        Launch("mix_backward_means", read + rows, product * (groups * scores + F)),
    ]
    if favoured:
        launches.insert(1, Launch("sum of parts", parts + landmarks, parts // FLOAT32))
        moved = 2 * elements * size + grad_q + landmarks * (d + 2)
        launches.append(Launch("column_gradient", moved, product * 2 * _products(size)))
    return launches


def temporal_forward(
    B: int, N: int, F: int, h: int, d: int, size: int, project_values: bool
) -> list[Launch]:
    """x is read for the attention, which is kept for later, and again for the values."""
    scores = _temporal_scores(B, N, F, h, d, size, projected=True, twice=size != FLOAT32)
    if project_values:
        return [scores, _temporal_pool(B, N, F, h, d, size)]
    D, attention = h * d, B * N * h * F * FLOAT32
    values = Launch("temporal_sum", B * N * D * size * (F + 1) + attention, 2 * B * N * F * D)
    return [scores, values]


def temporal_backward(
    B: int, N: int, F: int, h: int, d: int, size: int, project_values: bool
) -> list[Launch]:
    """The gradients of the attention, of x and of q, then of the weight, keys and values.

    Each tile of 16 frames absorbs the queries for itself to make the gradients of x.
    """
    D, tokens, sides = h * d, B * N, 1 + project_values
    row, attention = tokens * D * size, tokens * h * F * FLOAT32
    scores = _temporal_scores(B, N, F, h, d, size, projected=project_values, twice=False)
    scores = scores._replace(bytes=scores.bytes + attention)
    square, of_frames = 2 * tokens * D * D, 2 * tokens * h * F * D
    spread = row * (2 + F) + 2 * attention + sides * D * D * size
    parts = temporal_weight_parts(tokens) * D * D * FLOAT32
    moved = row * (1 + F) + attention + parts
    weight = [
        Launch("temporal_weight", moved, square + of_frames),
        Launch("sum of parts", parts + D * D * (2 * FLOAT32 + size), parts // FLOAT32),
    ]
    return [
        scores,
        Launch("temporal_spread", spread, -(-F // 16) * sides * square + 2 * of_frames),
        _temporal_pool(B, N, F, h, d, size),
        *weight * sides,
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


# By the name of an operator, from its arguments (real ones, or tensors of the meta device).
def _of_landmarks(x: Tensor, number: int, num_frames: int, farthest: bool) -> list[Launch]:
    B, h, T, d = x.shape
    return landmarks_forward(B, h, T, number, d, x.element_size(), farthest)


def _of_landmarks_backward(
    x: Tensor, chosen: Tensor, num_frames: int, grad: Tensor
) -> list[Launch]:
    (B, h, T, d), farthest = x.shape, chosen.numel() > 0
    return landmarks_backward(B, h, T, grad.shape[2], d, x.element_size(), farthest)


def _of_proposals(q_landmarks: Tensor, k_landmarks: Tensor, noise: Any) -> list[Launch]:
    B, h, C, d = q_landmarks.shape
    return proposals_forward(B, h, C, d, noise is not None)


def _of_proposals_backward(q_landmarks: Tensor, *more: Any) -> list[Launch]:
    with_noise, _, grad_landmarks = more[4:7]
    B, h, C, d = q_landmarks.shape
    return proposals_backward(B, h, C, d, with_noise, grad_landmarks is not None)


def _of_seen(launches: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
    def traffic(samples: Tensor, k: Tensor, v: Tensor | None, num_frames: int, *more: Any):
        (B, h, keys, d), C, values = k.shape, samples.shape[2], v is not None
        return launches(B, h, num_frames, keys // num_frames, C, d, k.element_size(), values)

    return traffic


def _of_mix(launches: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
    def traffic(q: Tensor, samples: Tensor, log_sums: Tensor, means: Tensor, *more: Any):
        (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
        return launches(B, h, N, F, C, d, q.element_size(), favoured=more[0] is not None)

    return traffic


def _of_temporal(launches: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
    def traffic(q: Tensor, x: Tensor, weight: Tensor, bias: Any, project_values: bool, *more: Any):
        (B, N, h, d), F = q.shape, x.shape[1]
        return launches(B, N, F, h, d, q.element_size(), project_values)

    return traffic


OPERATORS: dict[str, Callable[..., list[Launch]]] = {
    "slowfast_lara::landmarks": _of_landmarks,
    "slowfast_lara::landmarks_backward": _of_landmarks_backward,
    "slowfast_lara::proposals": _of_proposals,
    "slowfast_lara::proposals_backward": _of_proposals_backward,
    "slowfast_lara::seen": _of_seen(seen_forward),
    "slowfast_lara::seen_backward": _of_seen(seen_backward),
    "slowfast_lara::mix": _of_mix(mix_forward),
    "slowfast_lara::mix_backward": _of_mix(mix_backward),
    "slowfast_lara::temporal": _of_temporal(temporal_forward),
    "slowfast_lara::temporal_backward": _of_temporal(temporal_backward),
}
