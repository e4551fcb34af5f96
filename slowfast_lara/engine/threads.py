"""How many threads PyTorch computes with on a CPU.

The threads of an operation wait for the slowest of them. If another program keeps one
core busy, each operation waits until that core is free for a moment: of no account in
a large product, but a small model spends nearly all of its time so. A training of
configs/quick took 200 s with two threads and 45 s with one where one of two cores was
busy; and on quiet cores, its loader's workers have use for the second one.
"""

from __future__ import annotations

import os

import torch
from fvcore.common.config import CfgNode

# The products of narrower models are small. Measured from 96 to 768.
NARROW = 384


def choose_threads(cfg: CfgNode) -> str:
    """Set the number of threads by config and environment alone; the reason, for the log.

    Sums depend on it in the last bits, so a resumed run must have the same number.
    """
    if cfg.NUM_GPUS > 0:
        reason = "the work is on the GPU"
    elif os.environ.get("OMP_NUM_THREADS"):
        reason = "by OMP_NUM_THREADS"
    elif cfg.VIT.EMBED_DIM < NARROW:
        torch.set_num_threads(1)
        reason = f"VIT.EMBED_DIM is below {NARROW}; OMP_NUM_THREADS sets another number"
    else:
        reason = "PyTorch's choice for this machine; OMP_NUM_THREADS sets another number"
    return f"{torch.get_num_threads()} ({reason})"
