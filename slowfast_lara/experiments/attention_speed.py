"""Time and memory of the attentions, over the crop and over the sequence length.

`crop`: the trajectory layer of ViT-B on 8 frames, forward and backward, against
the textbook layer. `length`: the paper's efficiency table (appendix H.5), whole
encoders of 8 layers, 192 wide, 3 heads, 16 samples, all keys in one group,
against softmax attention that makes its matrix.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slowfast_lara.attention import ESTIMATORS, Estimator, build_estimator
from slowfast_lara.attention.softmax import softmax_weights
from slowfast_lara.errors import InputError
from slowfast_lara.experiments.measure import best_times, count_flops, environment, peak_memory
from slowfast_lara.experiments.speed_table import Report
from slowfast_lara.experiments.textbook import TextbookTrajectoryAttention
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.motionformer import Block
from slowfast_lara.models.space_time import JointAttention, TrajectoryAttention

WIDTH, HEADS, FRAMES, LANDMARKS = 768, 12, 8, 128


def run_crop(args: argparse.Namespace) -> None:
    chosen = _chosen(args.estimators)
    report = Report("trajectory layer, ViT-B, 8 frames, batch 1", "crop", "textbook", environment())
    for crop in args.crops:
        tokens = torch.randn(1, 1 + FRAMES * (crop // 16) ** 2, WIDTH, requires_grad=True)
        textbook = TextbookTrajectoryAttention(trajectory_layer("softmax"))
        layers: dict[str, nn.Module] = {"textbook": textbook}
        layers.update((name, trajectory_layer(name)) for name in chosen)
        _measure(report, crop, layers, lambda layer, x=tokens: layer(x, FRAMES), args.repeats)
    if args.flops:
        crop = args.crops[0]
        for name, gflops in model_gflops(crop, chosen).items():
            report.note(
                f"{name}: {gflops:.1f} GFLOPs for the whole model at {crop} pixels (fvcore)"
            )
    report.publish(args.out)


def run_length(args: argparse.Namespace) -> None:
    chosen = _chosen(args.estimators)
    title = "encoder of 8 layers, 192 wide, 3 heads, 16 samples, batch 1"
    report = Report(title, "tokens", "plain softmax", environment())
    for length in args.lengths:
        x = torch.randn(1, 1 + length, 192, requires_grad=True)
        encoders = {"plain softmax": encoder(PlainSoftmax)}
        for name in chosen:
            encoders[name] = encoder(
                lambda name=name: build_estimator(name, head_dim=64, num_heads=3, num_landmarks=16)
            )
        _measure(report, length, encoders, lambda model, x=x: model(x), args.repeats)
    report.publish(args.out)


def _chosen(names: list[str] | None) -> list[str]:
    for name in names or ():
        if name not in ESTIMATORS:
            raise InputError(f"unknown estimator {name!r}; known: {', '.join(ESTIMATORS)}")
    return names or list(ESTIMATORS)


def trajectory_layer(name: str) -> TrajectoryAttention:
    estimator = build_estimator(
        name, head_dim=WIDTH // HEADS, num_heads=HEADS, num_landmarks=LANDMARKS
    )
    return TrajectoryAttention(WIDTH, HEADS, estimator, qkv_bias=True, drop=0.0)


def _measure(
    report: Report,
    size: int,
    models: dict[str, nn.Module],
    call: Callable[..., Tensor],
    repeats: int,
) -> None:
    def forward(model: nn.Module) -> None:
        with torch.no_grad():
            call(model)

    def both(model: nn.Module) -> None:
        call(model).sum().backward()

    for model in models.values():
        model.eval()
    times = best_times({name: lambda m=m: forward(m) for name, m in models.items()}, repeats)
    for model in models.values():
        model.train()
    both_times = best_times({name: lambda m=m: both(m) for name, m in models.items()}, repeats)
    for name, model in models.items():
        report.add(size, name, times[name], both_times[name], peak_memory(lambda m=model: both(m)))


class PlainSoftmax(Estimator):
    """Softmax attention that makes its N x N matrix, the paper's baseline."""

    exact = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, num_frames: int = 1) -> Tensor:
        return (softmax_weights(q, k) @ v).unsqueeze(3)


class _Encoder(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, 1)
        return x


def encoder(make_estimator: Callable[[], Any]) -> nn.Module:
    """The paper's encoder, whose layers attend to all tokens at once."""
    layers = (JointAttention(192, 3, make_estimator(), True, 0.0) for _ in range(8))
    return _Encoder([Block(192, layer, None, 4.0, 0.0, 0.0) for layer in layers])


def model_gflops(crop: int, estimators: list[str]) -> dict[str, float]:
    """GFLOPs of a whole ViT-B Motionformer by attention, the textbook layer's first."""
    clip = torch.zeros(1, 3, 2 * FRAMES, crop, crop)
    counts = {}
    for name in ["textbook", *estimators]:
        estimator = "softmax" if name == "textbook" else name
        model = VisionTransformer(num_classes=400, estimator=estimator).eval()
        if name == "textbook":
            for block in model.blocks:
                block.attn = TextbookTrajectoryAttention(block.attn)
        with torch.no_grad():
            counts[name] = count_flops(model, [clip]) / 1e9
    return counts
