"""How a GPU multiplies in float32, and how cuDNN chooses its convolutions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from fvcore.common.config import CfgNode


def choose_gpu_arithmetic(cfg: CfgNode) -> None:
    """Set it by the config alone: PyTorch itself lets cuDNN take TF32."""
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    torch.backends.cudnn.allow_tf32 = cfg.ALLOW_TF32
    torch.backends.cuda.matmul.allow_tf32 = cfg.ALLOW_TF32


@contextlib.contextmanager
def gpu_arithmetic_of_a_run(cfg: CfgNode) -> Iterator[None]:
    """`choose_gpu_arithmetic` for a while, in a process that has chosen its own."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    try:
        before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    except RuntimeError:  # chosen by PyTorch's newer names, which hide it from these: it stays
        yield
        return
    choose_gpu_arithmetic(cfg)
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
