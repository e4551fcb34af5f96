"""Numerics of a run: CPU threads and the arithmetic of GPUs, both set from the config.

The last bits of sums depend on these settings, so a resumed run must not change them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from fvcore.common.config import CfgNode

# Models with VIT.EMBED_DIM below this (the width of ViT-S) use one CPU thread. All threads of an
# operation wait for the slowest one, so small operations mostly wait if a core is busy. On two busy
# cores, two threads took 23 times as long as one at width 96, 4 to 11 times at 192 and 384, and 2.5
# times at 768. With narrow models, DataLoader workers use the other cores.
NARROW = 384


def choose_threads(cfg: CfgNode) -> str:
    """Set the number of CPU threads from config and environment; return number and reason."""
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


def choose_gpu_arithmetic(cfg: CfgNode) -> None:
    """Set TF32 and cuDNN benchmarking from the config. PyTorch's default allows TF32 in cuDNN."""
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    torch.backends.cudnn.allow_tf32 = cfg.ALLOW_TF32
    torch.backends.cuda.matmul.allow_tf32 = cfg.ALLOW_TF32


@contextlib.contextmanager
def gpu_arithmetic(cfg: CfgNode) -> Iterator[None]:
    """Apply `choose_gpu_arithmetic`, and restore the previous settings on exit."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    try:
        before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    except RuntimeError:  # fp32_precision is set, so the flags cannot be read: change nothing
        yield
        return
    choose_gpu_arithmetic(cfg)
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
