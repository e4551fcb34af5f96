"""Time, memory and arithmetic of a function, and the machine it ran on."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# The profiler announces itself on stderr at lower levels.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch  # noqa: E402
from fvcore.nn import FlopCountAnalysis  # noqa: E402
from fvcore.nn.jit_handles import get_shape  # noqa: E402
from torch import nn  # noqa: E402
from torch._C._profiler import _EventType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

Job = Callable[[], Any]


def environment() -> dict[str, str]:
    """Hardware, versions and date, for the head of a result."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def best_times(jobs: Mapping[str, Job], repeats: int) -> dict[str, float]:
    """Seconds of each job: the best of several rounds through all of them.

    Rounds, so that what else the machine does meets all jobs alike.
    """
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            _synchronise()
            start = time.perf_counter()
            job()
            _synchronise()
            times[name].append(time.perf_counter() - start)
    return {name: min(seconds) for name, seconds in times.items()}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(job: Job) -> float:
    """The most bytes of tensors that a job held at once, beyond those before it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    held = peak = 0
    for _, size in sorted(_allocations(tree)):
        held += size
        peak = max(peak, held)
    return peak


def _allocations(events: list[Any]) -> Iterator[tuple[int, int]]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def count_flops(model: nn.Module, *inputs: Any, projected_values: bool = False) -> int:
    """Multiply-adds by fvcore's counter, taught the operators that it does not know."""

    def fused_attention(given: list[Any], _: list[Any]) -> int:
        *batch, queries, d = get_shape(given[0])
        keys, values = get_shape(given[1])[-2], get_shape(given[2])[-1]
        return _product(batch) * queries * keys * (d + values)

    def temporal_stage(given: list[Any], _: list[Any]) -> int:
        B, N, h, d = get_shape(given[0])
        F, D = get_shape(given[1])[1], h * d
        absorb, logits = B * N * D * D, B * N * h * F * D
        return absorb + logits + (logits + absorb if projected_values else B * N * F * D)

    def added_product(given: list[Any], _: list[Any]) -> int:
        (batch, rows, inner), columns = get_shape(given[1]), get_shape(given[2])[2]
        return batch * rows * inner * columns

    def combine_frames(given: list[Any], _: list[Any]) -> int:
        total = 0
        for scores, means in zip(given[::3], given[2::3]):  # of each group of heads
            B, h, N, C = get_shape(scores)
            _, _, F, _, d = get_shape(means)
            total += B * h * N * F * C * d
        return total

    analysis = FlopCountAnalysis(model, inputs)
    analysis.set_op_handle(
        **{
            "aten::scaled_dot_product_attention": fused_attention,
            "aten::baddbmm": added_product,
            "prim::PythonOp._TemporalAttention": temporal_stage,
            "prim::PythonOp._CombineFrames": combine_frames,
        }
    )
    analysis.unsupported_ops_warnings(False)
    analysis.uncalled_modules_warnings(False)
    analysis.tracer_warnings("none")
    return int(analysis.total())


def _product(numbers: list[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
