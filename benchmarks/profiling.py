"""Peak memory of a function, and multiply-accumulates of a model, counted by fvcore."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def peak_memory(job: Callable[[], Any]) -> float:
    """Peak of tensor memory during a job, in bytes, minus the memory allocated before the job."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()
        return torch.cuda.max_memory_allocated() - before
    # At lower log levels the profiler prints start-up messages to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
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
    """Multiply-accumulates of a model, layer norms included."""
    return int(analyse_flops(model, *inputs, projected_values=projected_values).total())


def analyse_flops(
    model: nn.Module, *inputs: Any, projected_values: bool = False
) -> FlopCountAnalysis:
    """Multiply-accumulates of a model by fvcore, with handlers for operators that it lacks.

    fvcore and papers on video models call a multiply-accumulate a FLOP. The count of the temporal
    stage depends on `projected_values`: whether this stage projects the values.
    """

    def fused_attention(inputs: list[Any], _: list[Any]) -> int:
        *batch, queries, d = get_shape(inputs[0])
        keys, values = get_shape(inputs[1])[-2], get_shape(inputs[2])[-1]
        return math.prod(batch) * queries * keys * (d + values)

    def group_attention(inputs: list[Any], _: list[Any]) -> int:
        F, *batch, groups, d = get_shape(inputs[1])
        return F * math.prod(batch) * get_shape(inputs[0])[-2] * groups * 2 * d

    def temporal_stage(inputs: list[Any], _: list[Any]) -> int:
        B, N, h, d = get_shape(inputs[0])
        F, D = get_shape(inputs[1])[1], h * d
        absorb, logits = B * N * D * D, B * N * h * F * D
        return absorb + logits + (logits + absorb if projected_values else B * N * F * D)

    def baddbmm(inputs: list[Any], _: list[Any]) -> int:
        (batch, rows, inner), columns = get_shape(inputs[1]), get_shape(inputs[2])[2]
        return batch * rows * inner * columns

    analysis = FlopCountAnalysis(model, inputs)
    analysis.set_op_handle(
        **{
            "aten::scaled_dot_product_attention": fused_attention,
            "aten::baddbmm": baddbmm,
            "prim::PythonOp._AttendOnCpu": group_attention,
            "prim::PythonOp._TemporalAttention": temporal_stage,
        }
    )
    analysis.unsupported_ops_warnings(False)
    analysis.uncalled_modules_warnings(False)
    analysis.tracer_warnings("none")
    return analysis
