"""Numerics of a run: CPU threads, autocast and the arithmetic of GPUs, set from the config.

The last bits of sums depend on these settings, so a resumed run must not change them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from fvcore.common.config import CfgNode

# Models with VIT.EMBED_DIM below this value, the width of ViT-S, use one CPU thread. The threads of
# an operation wait for the slowest thread. If a core is busy, small operations spend most of their
# time waiting. On two busy cores, two threads took 23 times as long as one thread at width 96, 4 to
# 11 times at 192 and 384, and 2.5 times at 768. DataLoader workers use the other cores.
NARROW = 384


def choose_threads(cfg: CfgNode) -> str:
    """Set the number of CPU threads from config and environment; return it and the reason."""
    if cfg.NUM_GPUS > 0 or cfg.DEVICE == "mps":
        reason = "the model runs on the GPU"
    elif os.environ.get("OMP_NUM_THREADS"):
        reason = "set by OMP_NUM_THREADS"
    elif cfg.VIT.EMBED_DIM < NARROW:
        torch.set_num_threads(1)
        reason = f"VIT.EMBED_DIM is below {NARROW}; OMP_NUM_THREADS overrides this"
    else:
        reason = "PyTorch's default; OMP_NUM_THREADS overrides this"
    return f"{torch.get_num_threads()} ({reason})"


@contextlib.contextmanager
def cpu_threads(cfg: CfgNode) -> Iterator[None]:
    """Apply `choose_threads`, and restore the previous number of threads on exit."""
    before = torch.get_num_threads()
    choose_threads(cfg)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast_dtype(cfg: CfgNode, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device; None if the model computes in float32.

    With SOLVER.PRECISION auto, a CPU computes in float32: on a CPU without half-precision
    instructions, autocast took 20 times as long as float32.
    """
    if not cfg.SOLVER.USE_MIXED_PRECISION:
        return None
    if cfg.SOLVER.PRECISION != "auto":
        return getattr(torch, cfg.SOLVER.PRECISION)
    if device.type == "cpu":
        return None
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


def choose_gpu_arithmetic(cfg: CfgNode) -> None:
    """Set TF32, cuDNN benchmarking and determinism from the config."""
    torch.use_deterministic_algorithms(cfg.DETERMINISTIC)
    torch.backends.cudnn.deterministic = cfg.DETERMINISTIC
    if cfg.DETERMINISTIC:  # cuBLAS reads this variable at its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    torch.backends.cudnn.allow_tf32 = cfg.ALLOW_TF32
    torch.backends.cuda.matmul.allow_tf32 = cfg.ALLOW_TF32


@contextlib.contextmanager
def gpu_arithmetic(cfg: CfgNode) -> Iterator[None]:
    """Apply `choose_gpu_arithmetic`, and restore the previous settings of PyTorch on exit.

    If the previous settings cannot be read, the settings stay as they are.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    try:
        before = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32
    except RuntimeError:  # if fp32_precision is set, allow_tf32 cannot be read
        yield
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    choose_gpu_arithmetic(cfg)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
