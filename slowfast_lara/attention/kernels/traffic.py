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

FLOAT32 = 4
# Frames of which one program of the mixing step's backward pass collects the gradients
# (mixing.py): the scores are made once for each group of them.
FRAME_GROUP = 2


class Launch(NamedTuple):
    """One kernel: bytes to and from memory, and floating-point operations."""

    kernel: str
    bytes: int
    flops: int


def _products(size: int) -> int:
    return 1 if size == FLOAT32 else 2


def seen_forward(
    B: int, h: int, F: int, P: int, C: int, d: int, size: int, values: bool = True
) -> list[Launch]:
    """What each sample sees of each frame; without values only the log-sums."""
    keys, statistics = B * h * F * P * d * size, B * h * F * C
    moved = keys + B * h * C * d * FLOAT32 + statistics * FLOAT32
    if values:
        moved += keys + statistics * d * size
    product = 2 * B * h * F * P * C * d
    return [Launch("seen_forward", moved, product * (_products(size) + values))]


def seen_backward(
    B: int, h: int, F: int, P: int, C: int, d: int, size: int, values: bool = True
) -> list[Launch]:
    """One kernel for the keys and values, one for the samples; each makes the shares anew."""
    keys, statistics = B * h * F * P * d * size, B * h * F * C
    samples = B * h * C * d * FLOAT32
    read = keys * (1 + values) + samples + 2 * statistics * FLOAT32
    if values:
        read += 2 * statistics * d * size
    product = 2 * B * h * F * P * C * d
    again = _products(size) + values
    return [
        Launch("seen_backward_keys", read + keys * (1 + values), product * (again + 1 + values)),
        Launch("seen_backward_samples", read + samples, product * (again + 1)),
    ]


def mix_forward(
    B: int, h: int, N: int, F: int, C: int, d: int, size: int, favoured: bool
) -> list[Launch]:
    """The estimate itself; `favoured`: with the queries that each landmark favours."""
    queries, sides = B * h * N * d * size, 1 + favoured
    statistics = B * h * F * C * (d * size + FLOAT32)
    small = B * h * C * (d * sides + 4 * favoured) * FLOAT32
    product = 2 * B * h * N * C * d
    moved = queries + small + statistics + F * queries
    return [Launch("mix_forward", moved, product * (_products(size) * sides + F))]


def mix_backward(
    B: int, h: int, N: int, F: int, C: int, d: int, size: int, favoured: bool
) -> list[Launch]:
    """The queries' gradients first, with four numbers for each query that the rest reads."""
    queries, sides = B * h * N * d * size, 1 + favoured
    statistics = B * h * F * C * (d * size + FLOAT32)
    small = B * h * C * (d * sides + 4 * favoured) * FLOAT32
    rows = B * h * N * (2 * F + 2 * favoured) * FLOAT32
    groups = -(-F // FRAME_GROUP)
    product, scores = 2 * B * h * N * C * d, _products(size) * sides
    read = queries + F * queries + small + statistics + rows
    return [
        Launch("mix_backward_queries", read + queries, product * (scores + F + sides)),
        Launch(
            "mix_backward_samples",
            read + statistics + groups * small,
            product * (groups * (scores + sides) + 2 * F),
        ),
        Launch("sum of frame groups", (groups + 1) * small, groups * small // FLOAT32),
    ]


def temporal_forward(
    B: int, N: int, F: int, h: int, d: int, size: int, project_values: bool
) -> list[Launch]:
    """x is read for the logits and again for the values; the attention is kept for later."""
    D, tokens = h * d, B * N
    moved = tokens * D * size * (2 + 2 * F) + tokens * h * F * FLOAT32
    moved += (1 + project_values) * D * D * size
    of_frames = 2 * tokens * h * F
    flops = 2 * tokens * D * D + of_frames * D
    flops += 2 * tokens * D * D + of_frames * D if project_values else of_frames * d
    return [Launch("temporal_forward", moved, flops)]


def temporal_backward(
    B: int, N: int, F: int, h: int, d: int, size: int, project_values: bool
) -> list[Launch]:
    """The tokens' gradients, then those of the weights, for keys and values one by one."""
    D, tokens = h * d, B * N
    row, attention = tokens * D * size, tokens * h * F * FLOAT32
    sides = 1 + project_values
    of_frames, square = 2 * tokens * h * F, 2 * tokens * D * D
    grads = row * (3 + 3 * F) + 2 * attention + sides * D * D * size
    flops = 2 * square + 2 * of_frames * D
    flops += 2 * square + 2 * of_frames * D if project_values else 2 * of_frames * d
    parts = temporal_weight_parts(tokens) * D * D * FLOAT32
    moved = row * (1 + F) + attention + parts
    weight = Launch("temporal_backward_weight", moved, square + of_frames * D)
    total = Launch("sum of token parts", parts + D * D * FLOAT32, parts // FLOAT32)
    return [Launch("temporal_backward_tokens", grads, flops), *[weight, total] * sides]


def temporal_weight_parts(tokens: int) -> int:
    """Into how many parts the tokens are cut for the weights' gradients: enough programs."""
    return max(1, min(16, tokens // 256))


# By the name of an operator, from its arguments (real ones, or tensors of the meta device).
def _of_seen(launches: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
    def traffic(samples: Tensor, k: Tensor, v: Tensor | None, num_frames: int, *more: Any):
        B, h, keys, d = k.shape
        sizes = (B, h, num_frames, keys // num_frames, samples.shape[2], d, k.element_size())
        return launches(*sizes, values=v is not None)

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
    "slowfast_lara::seen": _of_seen(seen_forward),
    "slowfast_lara::seen_backward": _of_seen(seen_backward),
    "slowfast_lara::mix": _of_mix(mix_forward),
    "slowfast_lara::mix_backward": _of_mix(mix_backward),
    "slowfast_lara::temporal": _of_temporal(temporal_forward),
    "slowfast_lara::temporal_backward": _of_temporal(temporal_backward),
}
