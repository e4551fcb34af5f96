"""Run time and multiply-accumulates (MACs) of functions, and a description of the machine."""

from __future__ import annotations

import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from slowfast_lara.attention.kernels.measure import elapsed_ms

Job = Callable[[], Any]
# Untimed runs of a job: the first runs compile kernels, choose algorithms and fill caches.
WARM_UP = 10


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


class CallTimes(NamedTuple):
    """Device seconds per run of a job, in back-to-back runs; host seconds until a run returns."""

    device: float
    host: float


def call_times(job: Job, device: torch.device, seconds: float, batches: int = 5) -> CallTimes:
    """Return the shortest measured device and host time per run of `job`, after a warm-up.

    The device time is from the fastest of `batches` batches of runs. All batches together take
    about `seconds`, but each batch has at least 1 and at most 1000 runs. On a GPU, CUDA events time
    a batch, so synchronisation is not included. If device and host time are close, Python limits
    the speed.
    """
    for _ in range(WARM_UP):
        job()
    single = _batch_seconds(job, 1, device)
    calls = max(1, min(1000, int(seconds / batches / max(single, 1e-9))))
    best = min(_batch_seconds(job, calls, device) / calls for _ in range(batches))
    return CallTimes(best, min(_host_seconds(job) for _ in range(batches)))


def _batch_seconds(job: Job, calls: int, device: torch.device) -> float:
    _synchronize()
    return elapsed_ms(job, calls, device) / 1e3


def _host_seconds(job: Job) -> float:
    """Host time of one run, started on an idle device: a full launch queue would block Python."""
    _synchronize()
    begin = time.perf_counter()
    job()
    return time.perf_counter() - begin


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
