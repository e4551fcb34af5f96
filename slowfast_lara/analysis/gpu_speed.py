"""Speed of attention and of whole models on a GPU.

First, every operator of the Triton kernels is compared with PyTorch in float64. Then each attention
is timed for each crop size and precision: in one ViT-B layer (forward and backward pass) and in a
whole model (forward pass of a test, training step).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from slowfast_lara.analysis.measure import best_times, environment
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.attention import Estimator, build_estimator
from slowfast_lara.attention.kernels.choice import obstacle
from slowfast_lara.attention.kernels.self_check import Comparison, compare_operators
from slowfast_lara.errors import InputError
from slowfast_lara.files import write_json
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.attention_config import display_name
from slowfast_lara.progress import print_progress

ATTENTIONS = ("softmax", "lara", "performer", "nystrom")
WIDTH, HEADS, PATCH = 768, 12, 16  # of ViT-B
FRAMES, LANDMARKS, CLASSES = 8, 128, 400
CHECKED_SIZES = (WIDTH // HEADS, LANDMARKS)
Milliseconds = float | None  # None: out of memory
Timer = Callable[[Mapping[str, Callable[[], object]]], dict[str, float] | None]


class Timing(NamedTuple):
    """Times of one attention at one crop size and precision, in milliseconds."""

    crop: int
    precision: str
    attention: str
    forward: Milliseconds  # of one layer
    backward: Milliseconds  # of one layer
    model_forward: Milliseconds
    model_step: Milliseconds

    def __str__(self) -> str:
        names = (name.replace("_", " ") for name in self._fields[3:])
        times = ("out of memory" if ms is None else f"{ms:.2f} ms" for ms in self[3:])
        parts = ", ".join(f"{name} {ms}" for name, ms in zip(names, times))
        return f"{self.crop} {self.precision} {self.attention}: {parts}"

    @property
    def both(self) -> float:
        return math.inf if self.forward is None else self.forward + (self.backward or 0)


@dataclass
class GpuTable(ResultTable):
    clips: int
    checks: dict[str, list[Comparison]]  # precision -> errors of all operators
    timings: list[Timing] = field(default_factory=list)

    def cells(self) -> Cells:
        rows: list[list[object]] = [[name.replace("_", " ") for name in Timing._fields]]
        for timing in self.timings:
            times = ("-" if ms is None else f"{ms:.2f}" for ms in timing[3:])
            rows.append([*timing[:3], *times])
        return rows

    def csv_cells(self) -> Cells:
        return [Timing._fields, *self.timings]

    def footer(self) -> list[str]:
        lines = [self.fastest()]
        for precision, checks in self.checks.items():
            largest = max(check.error or 0.0 for check in checks)
            what = f"largest relative error of the operators in {precision}, compared with float64"
            lines.append(f"{what}: {largest:.1e}")
            lines += [f"{c.operator} in {precision}: {c.problem}" for c in checks if c.problem]
        return lines

    def fastest(self) -> str:
        """One line with the fastest attention for each crop size and precision."""
        parts = []
        for size, timings in itertools.groupby(self.timings, key=lambda t: (t.crop, t.precision)):
            best = min(timings, key=lambda timing: timing.both)
            name = best.attention if best.both < math.inf else "out of memory"
            parts.append(f"{size[0]} {size[1]} {name}")
        return f"fastest attention, forward and backward: {', '.join(parts)}"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write PATH.csv, and PATH.json, which also has the operators' errors and the hardware."""
        super().write(path)
        content = {
            "environment": environment(),
            "clips": self.clips,
            "notes": self.notes,
            "checks": {key: [c._asdict() for c in checks] for key, checks in self.checks.items()},
            "milliseconds": [timing._asdict() for timing in self.timings],
            "fastest": self.fastest(),
        }
        write_json(f"{path}.json", content, indent=2)


def gpu_costs(
    crops: Sequence[int], clips: int, precisions: Sequence[str], repeats: int
) -> GpuTable:
    if not torch.cuda.is_available():
        raise InputError(
            "PyTorch finds no GPU on this machine; in a checkout, `python -m benchmarks roofline` "
            "estimates the times of a GPU, and `python -m benchmarks crop` measures this CPU"
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
    """Check and time all attentions on a device; `model_sizes` are VisionTransformer arguments."""
    problem = obstacle(device)
    notes = [f"Triton kernels are not used: {problem}"] if problem else []
    compare = partial(compare_operators, device, sizes=CHECKED_SIZES, reference=torch.float64)
    checks = {}
    for precision in [] if problem else precisions:
        print_progress(f"comparing the kernels with float64 in {precision}")
        checks[precision] = list(compare(getattr(torch, precision)))
    title = f"{clips} clips of {FRAMES} temporal tokens; milliseconds"
    table = GpuTable(title, clips, checks, notes=notes)
    time = partial(_milliseconds, repeats=repeats)
    cases = list(itertools.product(crops, precisions, ATTENTIONS))
    for number, (crop, precision, name) in enumerate(cases, start=1):
        dtype, tokens = getattr(torch, precision), FRAMES * (crop // PATCH) ** 2
        options: dict[str, Any] = {"num_landmarks": min(LANDMARKS, tokens)}
        head_dim = WIDTH // HEADS
        estimator = build_estimator(name, head_dim=head_dim, num_heads=HEADS, **options).to(device)
        shape = (clips, 1 + tokens, 3, HEADS, head_dim)
        attention_times = _attention_times(
            estimator, torch.randn(shape, device=device).to(dtype), time
        )
        model = VisionTransformer(
            num_classes=CLASSES, estimator=name, estimator_args=options, **model_sizes
        ).to(device)
        clip = torch.randn(clips, 3, 2 * FRAMES, crop, crop, device=device)
        times = (*attention_times, *_model_times(model, clip, dtype, time))
        table.timings.append(Timing(crop, precision, display_name(name), *times))
        print_progress(f"{number}/{len(cases)}: {table.timings[-1]}")
    return table


def _attention_times(
    estimator: Estimator, qkv: Tensor, time: Timer
) -> tuple[Milliseconds, Milliseconds]:
    """Times of an estimator's forward and backward pass on views of qkv, as in a layer."""
    qkv.requires_grad_()

    def forward() -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)[:, :, :, 1:]
        return estimator(q, k, v, num_frames=FRAMES)

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, qkv, out.detach())

    times = time({"forward": forward, "both": both})
    return (times["forward"], times["both"] - times["forward"]) if times else (None, None)


def _model_times(
    model: nn.Module, clip: Tensor, dtype: torch.dtype, time: Timer
) -> tuple[Milliseconds, Milliseconds]:
    """Times of a model's forward pass in eval mode, and of a training step."""
    labels = torch.zeros(len(clip), dtype=torch.long, device=clip.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def logits() -> Tensor:
        with torch.autocast(clip.device.type, dtype, enabled=dtype != torch.float32):
            return model([clip])

    def step() -> None:
        functional.cross_entropy(logits().float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    test_times = time({"test": torch.no_grad()(logits)}) or {}
    model.train()
    step_times = time({"step": step}) or {}
    return test_times.get("test"), step_times.get("step")


def _milliseconds(
    jobs: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, float] | None:
    """The best time of each job, or None if the device runs out of memory."""
    try:
        return {name: time * 1e3 for name, time in best_times(jobs, repeats).items()}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
