"""Measurements of `slowfast-lara benchmark gpu`: one attention, one temporal stage, whole models.

Attentions and the temporal stage run forward and backward on random tensors with the sizes of
ViT-B. A `step` is the forward pass, loss, backward pass and fused AdamW step of a model with
trajectory attention. `inference` is the forward pass of that model in eval mode. `machine`,
`check_kernels` and `measure` run in a worker process.

A path is an implementation: PyTorch's operations or the Triton kernels, with or without
torch.compile.
"""

from __future__ import annotations

import gc
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import slowfast_lara
from slowfast_lara.analysis.measure import call_times, environment
from slowfast_lara.attention import ESTIMATORS, build_estimator, has_kernels
from slowfast_lara.attention.kernels.choice import obstacle
from slowfast_lara.attention.kernels.self_check import Comparison, compare_operators
from slowfast_lara.attention.temporal import temporal_attention
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.attention_config import resolve_attention

WIDTH, HEADS, PATCH = 768, 12, 16  # as in ViT-B
HEAD_DIM, CLASSES = WIDTH // HEADS, 400
LANDMARKS, GROUPS = 128, 96  # landmarks per clip, groups of keys per frame
PARTS = ("attention", "temporal", "step", "inference")
# Name of a path -> value of `kernels`, and whether torch.compile is used.
PATHS = {
    "torch": ("torch", False),
    "triton": ("triton", False),
    "compile": ("torch", True),
    "triton+compile": ("triton", True),
}
OUT_OF_MEMORY = "out of memory"


class Settings(NamedTuple):
    """Settings that all measurements in a result file share."""

    device: str
    clips: int
    layers: int
    seconds: float  # per measurement, without warm-up


class Case(NamedTuple):
    """One measurement: part (one of PARTS), sizes, precision, attention and path (key of PATHS)."""

    part: str
    crop: int
    frames: int  # temporal tokens
    precision: str
    attention: str
    path: str

    @property
    def tokens(self) -> int:
        return self.frames * (self.crop // PATCH) ** 2

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)

    @property
    def kernels(self) -> str:
        return PATHS[self.path][0]

    def compiled(self, function: Any) -> Any:
        return torch.compile(function, dynamic=False) if PATHS[self.path][1] else function


class Cost(NamedTuple):
    """Total time and host (Python) time of one run, and peak GPU memory (None on a CPU)."""

    ms: float
    host_ms: float
    mib: float | None


def has_path(part: str, attention: str, path: str) -> bool:
    """Whether to measure a path: no if it lacks kernels, or runs the same code as another path."""
    name = "softmax" if part == "temporal" else resolve_attention(attention)[0]
    uses_kernels, compiled = PATHS[path][0] == "triton", PATHS[path][1]
    if part == "attention":  # torch.compile does not change Triton kernels
        return not uses_kernels or has_kernels(name) and not compiled
    return not (part == "temporal" and uses_kernels and compiled)


def machine(device: str) -> dict[str, str]:
    """Hardware and versions, without the host name.

    The entry "kernels" is the reason why Triton kernels cannot run, or "".
    """
    found = environment()
    del found["date"]
    found |= {"slowfast_lara": slowfast_lara.__version__, "triton": _triton_version()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "driver": _driver_version(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return found | {"system": platform.system(), "kernels": obstacle(torch.device(device))}


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done.stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return "unknown"


def check_kernels(device: str, precision: str) -> list[Comparison]:
    """Compare all operators that have Triton kernels for `precision` with PyTorch in float64."""
    sizes, dtype = (HEAD_DIM, LANDMARKS), getattr(torch, precision)
    return list(compare_operators(torch.device(device), dtype, sizes, reference=torch.float64))


def measure(case: Case, settings: Settings) -> Cost | str:
    """Time one case; returns OUT_OF_MEMORY if the GPU has too little memory."""
    torch.compiler.reset()  # at its recompile limit, torch.compile would fall back to eager mode
    device = torch.device(settings.device)
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = call_times(_JOBS[case.part](case, settings), device, settings.seconds)
        mib = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
        return Cost(times.device * 1e3, times.host * 1e3, mib)
    except torch.OutOfMemoryError:
        return OUT_OF_MEMORY
    finally:
        gc.collect()  # autograd graphs may have reference cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _estimator_arguments(case: Case) -> tuple[str, dict[str, Any]]:
    name, options = resolve_attention(case.attention)
    in_frame = ESTIMATORS[name].counts_keys_of_a_frame
    number = min(GROUPS, case.tokens // case.frames) if in_frame else min(LANDMARKS, case.tokens)
    return name, {"num_landmarks": number, **options}


def _attention_job(case: Case, settings: Settings) -> Callable[[], object]:
    """Forward and backward pass of an estimator on views of the qkv projection's output."""
    name, options = _estimator_arguments(case)
    options |= {"head_dim": HEAD_DIM, "num_heads": HEADS, "kernels": case.kernels}
    estimator = case.compiled(build_estimator(name, **options).to(settings.device))
    qkv = _normal(case, settings, settings.clips, 1 + case.tokens, 3, HEADS, HEAD_DIM)

    def job() -> None:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)[:, :, :, 1:]
        out = estimator(q, k, v, num_frames=case.frames)
        torch.autograd.grad(out, qkv, out.detach())

    return job


def _temporal_job(case: Case, settings: Settings) -> Callable[[], object]:
    """Forward and backward pass of the temporal stage of trajectory attention."""
    normal = partial(_normal, case, settings)
    q = normal(settings.clips, case.tokens, HEADS, HEAD_DIM)
    x = normal(settings.clips, case.frames, case.tokens, WIDTH)
    weight, bias = normal(2 * WIDTH, WIDTH), normal(2 * WIDTH)
    attend = case.compiled(temporal_attention)

    def job() -> None:
        out = attend(q, x, weight, bias, False, case.kernels)
        torch.autograd.grad(out, (q, x, weight), out.detach())

    return job


def _normal(case: Case, settings: Settings, *shape: int) -> Tensor:
    return torch.randn(shape, device=settings.device).to(case.dtype).requires_grad_()


def _model_and_clip(case: Case, settings: Settings) -> tuple[nn.Module, Tensor]:
    name, options = _estimator_arguments(case)
    model = VisionTransformer(
        num_classes=CLASSES,
        depth=settings.layers,
        num_frames=case.frames,
        estimator=name,
        estimator_args=options,
        kernels=case.kernels,
    ).to(settings.device)
    shape = (settings.clips, 3, 2 * case.frames, case.crop, case.crop)
    return model, torch.randn(shape, device=settings.device)


def _step_job(case: Case, settings: Settings) -> Callable[[], object]:
    model, clip = _model_and_clip(case, settings)
    forward = case.compiled(model)
    labels = torch.zeros(len(clip), dtype=torch.long, device=clip.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler(settings.device, enabled=case.precision == "float16")

    def job() -> None:
        with _autocast(case, settings):
            logits = forward([clip])
        scaler.scale(functional.cross_entropy(logits.float(), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return job


def _inference_job(case: Case, settings: Settings) -> Callable[[], object]:
    model, clip = _model_and_clip(case, settings)
    forward = case.compiled(model.eval())

    def job() -> None:
        with torch.no_grad(), _autocast(case, settings):
            forward([clip])

    return job


def _autocast(case: Case, settings: Settings) -> torch.autocast:
    return torch.autocast(settings.device, case.dtype, enabled=case.precision != "float32")


_JOBS = {
    "attention": _attention_job,
    "temporal": _temporal_job,
    "step": _step_job,
    "inference": _inference_job,
}
