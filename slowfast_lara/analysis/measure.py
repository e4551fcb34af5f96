"""Run time and multiply-accumulates (MACs) of functions, and a description of the machine."""

from __future__ import annotations

import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Job = Callable[[], Any]


def environment() -> dict[str, str]:
    """Hardware, versions and date, for the head of a result table."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.split(":", 1)[1] for line in file if line.startswith("model name"))
            return next(names).strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def best_times(jobs: Mapping[str, Job], repeats: int) -> dict[str, float]:
    """The shortest time of each job in seconds, over `repeats` rounds after a warm-up round.

    Each round runs all jobs, so that other load on the machine affects all jobs alike.
    """
    best = dict.fromkeys(jobs, math.inf)
    for number in range(1 + repeats):
        for name, job in jobs.items():
            _synchronize()
            start = time.perf_counter()
            job()
            _synchronize()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_macs(job: Job) -> int:
    """Count the multiply-accumulates in matmuls and attentions of a job on CPU tensors."""

    # FlopCounterMode has no formula for the CPU attention operator.
    def cpu_attention(
        q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
    ) -> int:
        return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={operator: cpu_attention}) as counter:
        job()
    return counter.get_total_flops() // 2
