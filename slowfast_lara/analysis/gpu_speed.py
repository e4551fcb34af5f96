"""Attention and whole models timed on a GPU, beside what the roofline says of it.

First every kernel is compared with float64 (gpu_checks.py). Then, for each crop and precision,
the attentions of one layer of ViT-B, forward and backward, and whole models with them: the
forward pass of a test and the step of a training.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.roofline import DEVICES, HEADS, WIDTH, Sizes, seconds, spatial_counts
from slowfast_lara.analysis.gpu_checks import Check, checks
from slowfast_lara.analysis.measure import best_times, environment
from slowfast_lara.analysis.result_files import aligned_table, csv_text, measured_on
from slowfast_lara.attention import build_estimator, has_kernels
from slowfast_lara.attention.kernels.choice import obstacle
from slowfast_lara.errors import InputError
from slowfast_lara.files import write_text
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.attention_config import display_name

ATTENTIONS = ("softmax", "lara", "performer", "nystrom")
FRAMES, LANDMARKS, CLASSES = 8, 128, 400


@dataclass(frozen=True)
class Times:
    """Milliseconds; None where the memory did not suffice, or nothing is known."""

    crop: int
    precision: str
    attention: str
    forward: float | None
    backward: float | None
    model_forward: float | None
    model_step: float | None
    estimated_forward: float | None
    estimated_backward: float | None

    @property
    def both(self) -> float:
        if self.forward is None or self.backward is None:
            return float("inf")
        return self.forward + self.backward


@dataclass
class GpuTable:
    clips: int
    checks: list[Check]
    times: list[Times]
    notes: list[str] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        lines = [f"{self.clips} clips of {FRAMES} frames; milliseconds", measured_on()]
        lines += [*self.notes, *(check.text() for check in self.checks)]
        rows = [[field.name.replace("_", " ") for field in dataclasses.fields(Times)]]
        for times in self.times:
            crop, precision, attention, *figures = dataclasses.astuple(times)
            cells = ("-" if figure is None else f"{figure:.2f}" for figure in figures)
            rows.append([str(crop), precision, attention, *cells])
        return "\n".join([*lines, aligned_table(rows, names=2), self.fastest()])

    def fastest(self) -> str:
        """For which sizes which attention is the fastest, in one line."""
        parts = []
        for precision in dict.fromkeys(times.precision for times in self.times):
            of_precision = [times for times in self.times if times.precision == precision]
            best = [
                (crop, min((t for t in of_precision if t.crop == crop), key=lambda t: t.both))
                for crop in dict.fromkeys(times.crop for times in of_precision)
            ]
            sizes = ", ".join(
                f"{crop} {times.attention if times.both < float('inf') else 'none: no memory'}"
                for crop, times in best
            )
            parts.append(f"{precision}: {sizes}")
        return f"fastest attention, forward and backward: {'; '.join(parts)}"

    def write(self, path: str) -> None:
        """PATH.csv and PATH.json, the latter with the checks and the hardware."""
        names = [field.name for field in dataclasses.fields(Times)]
        rows = [dataclasses.astuple(times) for times in self.times]
        write_text(f"{path}.csv", csv_text([names, *rows], [measured_on()]))
        content = {
            "environment": environment(),
            "clips": self.clips,
            "notes": self.notes,
            "checks": [check._asdict() for check in self.checks],
            "milliseconds": [dataclasses.asdict(times) for times in self.times],
            "fastest": self.fastest(),
        }
        write_text(f"{path}.json", json.dumps(content, indent=2) + "\n")


def gpu_costs(
    crops: Sequence[int], clips: int, precisions: Sequence[str], repeats: int
) -> GpuTable:
    if not torch.cuda.is_available():
        raise InputError(
            "PyTorch finds no GPU on this machine; `slowfast-lara benchmark roofline` estimates "
            "the times of one, `slowfast-lara benchmark crop` measures this CPU"
        )
    return costs_on(torch.device("cuda"), crops, clips, precisions, repeats)


def costs_on(
    device: torch.device,
    crops: Sequence[int],
    clips: int,
    precisions: Sequence[str],
    repeats: int,
    **model_sizes: Any,
) -> GpuTable:
    """Everything, on any device; smaller models by `model_sizes`, arguments of the model."""
    problem = obstacle(device)
    ways = ("torch",) if problem else ("torch", "triton")
    notes = [f"without our kernels: {problem}"] if problem else []
    table = GpuTable(clips, checks(device, precisions, ways), [], notes)
    for crop in crops:
        sizes = Sizes(crop, FRAMES, clips, LANDMARKS)
        for precision in precisions:
            dtype = getattr(torch, precision)
            for name in ATTENTIONS:
                times = (
                    *_attention_times(name, sizes, device, dtype, repeats),
                    *_model_times(name, sizes, device, dtype, repeats, model_sizes),
                    *_estimates(name, sizes, device, dtype, fused=not problem),
                )
                table.times.append(Times(crop, precision, display_name(name), *times))
    return table


Milliseconds = tuple[float | None, float | None]


def _attention_times(
    name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype, repeats: int
) -> Milliseconds:
    """Forward and backward of an estimator, on q, k, v as a layer projects them."""
    landmarks = min(LANDMARKS, sizes.tokens)
    estimator = build_estimator(
        name, head_dim=WIDTH // HEADS, num_heads=HEADS, num_landmarks=landmarks
    ).to(device)
    shape = (sizes.clips, 1 + sizes.tokens, 3, HEADS, WIDTH // HEADS)
    projected = torch.randn(shape, device=device).to(dtype).requires_grad_()

    def forward() -> Tensor:
        q, k, v = projected.permute(2, 0, 3, 1, 4)[:, :, :, 1:]
        return estimator(q, k, v, num_frames=sizes.frames)

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, projected, out.detach())

    times = _milliseconds({"forward": forward, "both": both}, repeats)
    if times is None:
        return None, None
    return times["forward"], times["both"] - times["forward"]


def _model_times(
    name: str,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    model_sizes: dict[str, Any],
) -> Milliseconds:
    """A whole model: the forward pass of a test, and a training step."""
    model = VisionTransformer(
        num_classes=CLASSES,
        estimator=name,
        estimator_args={"num_landmarks": min(LANDMARKS, sizes.tokens)},
        **model_sizes,
    ).to(device)
    clip = torch.randn(sizes.clips, 3, 2 * FRAMES, sizes.crop, sizes.crop, device=device)
    labels = torch.zeros(sizes.clips, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def logits() -> Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return model([clip])

    @torch.no_grad()
    def forward() -> None:
        logits()

    def step() -> None:
        functional.cross_entropy(logits().float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _of_modes(model, forward, step, repeats)


def _of_modes(
    model: nn.Module, forward: Callable[[], None], step: Callable[[], None], repeats: int
) -> Milliseconds:
    model.eval()
    test = _milliseconds({"test": forward}, repeats) or {}
    model.train()
    training = _milliseconds({"training": step}, repeats) or {}
    return test.get("test"), training.get("training")


def _milliseconds(
    jobs: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, float] | None:
    """None if the device's memory does not suffice."""
    try:
        return {name: time * 1e3 for name, time in best_times(jobs, repeats).items()}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _estimates(
    name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype, fused: bool
) -> Milliseconds:
    """What the roofline says of a GPU that it knows, in half precision."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # Whole words: an L40S is no L4.
    known = next((DEVICES[word] for word in re.findall(r"\w+", gpu) if word in DEVICES), None)
    if known is None or dtype == torch.float32:
        return None, None
    options = {"kernels": "triton"} if fused and has_kernels(name) else {}
    forward, backward = (seconds(c, known) * 1e3 for c in spatial_counts(name, sizes, **options))
    return forward, backward
