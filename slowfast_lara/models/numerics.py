"""How many threads PyTorch computes with on a CPU.

The threads of an operation wait for the slowest of them. If another program keeps one
core busy, each operation waits until that core is free for a moment. A large product
loses little by it, but a small model spends nearly all of its time so: a training of
configs/quick took 200 s with two threads and 50 s with one, where one of two cores was
busy. On quiet cores its loader's workers have use for the second one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from fvcore.common.config import CfgNode

# A ViT-S has this width. On two cores that other programs kept busy, two threads took 23
# times as long as one at width 96, 4 to 11 times at 192 and 384, 2.5 times at 768; on quiet
# cores the wide ones gain by threads.
NARROW = 384


def choose_threads(cfg: CfgNode) -> str:
    """Set the number of threads by config and environment alone; the reason, for the log.

    Sums depend on it in the last bits, so a resumed run must have the same number.
    """
    if cfg.NUM_GPUS > 0 or cfg.DEVICE == "mps":
        reason = "the work is on the GPU"
    elif os.environ.get("OMP_NUM_THREADS"):
        reason = "by OMP_NUM_THREADS"
    elif cfg.VIT.EMBED_DIM < NARROW:
        torch.set_num_threads(1)
        reason = f"VIT.EMBED_DIM is below {NARROW}; OMP_NUM_THREADS sets another number"
    else:
        reason = "PyTorch's choice for this machine; OMP_NUM_THREADS sets another number"
    return f"{torch.get_num_threads()} ({reason})"


@contextlib.contextmanager
def cpu_threads(cfg: CfgNode) -> Iterator[None]:
    """`choose_threads` for a while, in a process that has chosen its own number."""
    before = torch.get_num_threads()
    choose_threads(cfg)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_gpu_arithmetic(cfg: CfgNode) -> None:
    """Set it by the config alone: PyTorch itself lets cuDNN take TF32."""
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK
    torch.backends.cudnn.allow_tf32 = cfg.ALLOW_TF32
    torch.backends.cuda.matmul.allow_tf32 = cfg.ALLOW_TF32


@contextlib.contextmanager
def gpu_arithmetic(cfg: CfgNode) -> Iterator[None]:
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
