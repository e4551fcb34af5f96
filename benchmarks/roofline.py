"""Roofline estimates of the time of attention on a GPU; no GPU is needed.

Launches, bytes and FLOPs are counted on the meta device (kernel_counts.py). The time of a kernel is
max(bytes / bandwidth, FLOPs / peak FLOPs per second), plus 5 microseconds per launch. The estimates
serve to compare designs and sizes, not to predict times: a kernel that reaches half of the peak
takes twice the estimated time. The estimates are deterministic.

The table covers forward and backward pass of one ViT-B block in bfloat16. The parts of a block are
the spatial stage with each estimator, the temporal stage, and the rest (projections, MLP, norms).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.kernel_counts import Kernel, count_kernels
from benchmarks.roofline_table import PassCost, RooflineTable
from slowfast_lara.attention import ESTIMATORS, Estimator, build_estimator, has_kernels
from slowfast_lara.attention.temporal import temporal_attention
from slowfast_lara.errors import InputError, counted
from slowfast_lara.models.attention_config import RECOMMENDED, display_name
from slowfast_lara.models.motionformer import Block
from slowfast_lara.models.space_time import SpaceTimeAttention

WIDTH, HEADS = 768, 12
LAUNCH = 5e-6  # seconds
TEMPORAL, REST = "temporal stage", "rest of the block"


class Device(NamedTuple):
    """Peak bytes, half-precision FLOPs and float32 FLOPs per second, from the data sheet."""

    bandwidth: float
    half: float
    single: float


DEVICES = {
    "A100": Device(1.555e12, 312e12, 19.5e12),
    "H100": Device(3.35e12, 989e12, 67e12),
    "B200": Device(8.0e12, 2250e12, 80e12),
    "L4": Device(0.3e12, 121e12, 30.3e12),
}


class Sizes(NamedTuple):
    crop: int
    frames: int
    clips: int
    landmarks: int
    groups: int = 96  # of a frame's keys
    width: int = WIDTH
    heads: int = HEADS
    patch: int = 16
    joint: bool = False  # attention over the keys of all frames, without a temporal stage

    @property
    def tokens(self) -> int:
        return self.frames * (self.crop // self.patch) ** 2

    @property
    def key_frames(self) -> int:
        """Number of softmaxes per query: one for each frame, or one for all in joint attention."""
        return 1 if self.joint else self.frames


def seconds(kernels: Sequence[Kernel], device: Device) -> float:
    """Estimated seconds of kernels that run one after another."""
    return sum(
        max(k.bytes / device.bandwidth, k.flops / (device.half if k.half else device.single))
        + k.launches * LAUNCH
        for k in kernels
    )


def roofline(
    device: str,
    crops: Sequence[int],
    frames: Sequence[int],
    clips: int,
    landmarks: int,
    groups: int,
) -> RooflineTable:
    """Estimate all parts of a block for all combinations of crop and number of frames."""
    if device not in DEVICES:
        raise InputError(f"--device is {device!r}; must be one of {', '.join(DEVICES)}")
    table = RooflineTable(
        f"estimated for one layer of ViT-B on {device}: {counted(clips, 'clip')}, bfloat16, "
        f"{landmarks} landmarks or samples, {groups} groups of a frame's keys; counted, not "
        "measured"
    )
    for crop, number in itertools.product(crops, frames):
        for part, count in block_parts(Sizes(crop, number, clips, landmarks, groups)):
            forward, backward = (_pass_cost(kernels, DEVICES[device]) for kernels in count())
            table.costs[crop, number, part] = forward, backward
    return table


def _pass_cost(kernels: Sequence[Kernel], device: Device) -> PassCost:
    launches, moved, flops = (
        sum(getattr(k, key) for k in kernels) for key in ("launches", "bytes", "flops")
    )
    return PassCost(launches, moved, flops, seconds(kernels, device))


Counts = tuple[list[Kernel], list[Kernel]]  # forward, backward


def block_parts(sizes: Sizes) -> Iterator[tuple[str, Callable[[], Counts]]]:
    """Yield (name, counting function) for each part of a block; exact attention comes first."""
    fused = {"kernels": "triton"}
    settings: list[tuple[str, str, dict[str, Any]]]
    settings = [(name, display_name(name), {}) for name in ESTIMATORS]
    settings += [(name, f"{name}, recommended", opts) for name, opts in RECOMMENDED.values()]
    for name, shown, options in settings:
        yield shown, partial(spatial_counts, name, sizes, **options)
        if has_kernels(name) and not unsupported(name, sizes, options):
            yield f"{shown}, fused", partial(spatial_counts, name, sizes, **options, **fused)
    yield TEMPORAL, partial(temporal_counts, sizes)
    yield f"{TEMPORAL}, fused", partial(temporal_counts, sizes, **fused)
    yield REST, partial(rest_counts, sizes)


def unsupported(name: str, sizes: Sizes, options: dict[str, Any]) -> bool:
    """Whether the Triton kernels of an estimator do not support these sizes."""
    keys = sizes.tokens // sizes.key_frames
    return bool(_estimator(name, sizes, **options).unsupported(keys))


def _estimator(name: str, sizes: Sizes, **options: Any) -> Estimator:
    has_groups = ESTIMATORS[name].counts_keys_of_a_frame
    landmarks = sizes.groups if has_groups else min(sizes.landmarks, sizes.tokens)
    heads: dict[str, Any] = {"head_dim": sizes.width // sizes.heads, "num_heads": sizes.heads}
    return build_estimator(name, **heads, num_landmarks=landmarks, **options).to("meta")


def spatial_counts(name: str, sizes: Sizes, **options: Any) -> Counts:
    """Count the kernels of an estimator; q, k, v are views of the qkv projection's output."""
    estimator = _estimator(name, sizes, **options)
    projected = _leaf(sizes.clips, 1 + sizes.tokens, 3 * sizes.width)
    q, k, v = projected.unflatten(2, (3, sizes.heads, -1)).permute(2, 0, 3, 1, 4)[:, :, :, 1:]
    forward, out = count_kernels(lambda: estimator(q, k, v, num_frames=sizes.key_frames))
    return forward, _backward(out, [projected])


def temporal_counts(sizes: Sizes, **options: Any) -> Counts:
    width = sizes.width
    q = _leaf(sizes.clips, sizes.tokens, sizes.heads, width // sizes.heads)
    x = _leaf(sizes.clips, sizes.frames, sizes.tokens, width)
    weight, bias = _leaf(2 * width, width), _leaf(2 * width)
    forward, out = count_kernels(lambda: temporal_attention(q, x, weight, bias, False, **options))
    return forward, _backward(out, [q, x, weight, bias])


def _leaf(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)


def _backward(out: Tensor, inputs: Sequence[Tensor]) -> list[Kernel]:
    grad = torch.empty_like(out)
    return count_kernels(lambda: torch.autograd.grad(out, inputs, grad, allow_unused=True))[0]


class _Projections(SpaceTimeAttention):
    """A layer with its projections, but without attention."""

    def __init__(self, sizes: Sizes) -> None:
        exact = build_estimator("softmax", head_dim=sizes.width // sizes.heads)
        super().__init__(sizes.width, sizes.heads, exact, True, 0.0)
        self.proj_q = nn.Identity() if sizes.joint else nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, num_frames: int) -> Tensor:
        q, _, _ = self.queries_keys_values(x)
        own = self.proj_q(q[:, :, 1:].transpose(1, 2).flatten(2))
        return self.project(q[:, :, :1], own)


def rest_counts(sizes: Sizes) -> Counts:
    """Count the kernels of a block without attention: projections, MLP, norms."""
    layer = _Projections(sizes)
    block = Block(sizes.width, layer, None, 4.0, 0.0, 0.0).to("meta", torch.bfloat16)
    x = _leaf(sizes.clips, 1 + sizes.tokens, sizes.width)
    forward, out = count_kernels(lambda: block(x, sizes.frames))
    return forward, _backward(out, [x, *block.parameters()])
