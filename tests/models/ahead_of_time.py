"""Compile the temporal stage's kernels for GPUs that are not here: registers, spills, memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slowfast_lara.models import temporal_kernels

TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


class Compiled(NamedTuple):
    kernel: str
    registers: int
    spilled: int
    shared: int


def launches(dtype: torch.dtype, d: int, h: int, F: int, project_values: bool) -> list[Any]:
    """What one forward and one backward pass launch, recorded instead of launched."""
    recorded: list[Any] = []
    launch, temporal_kernels.launch = temporal_kernels.launch, lambda *call: recorded.append(call)
    try:
        q = torch.empty(2, 48, h, d, dtype=dtype)
        x = torch.empty(2, F, 48, h * d, dtype=dtype)
        weight, bias = (
            torch.empty(2 * h * d, h * d, dtype=dtype),
            torch.empty(2 * h * d, dtype=dtype),
        )
        forward, backward = (
            operator._init_fn
            for operator in (
                temporal_kernels.temporal_stage,
                temporal_kernels.temporal_stage_backward,
            )
        )
        out, attention = forward(q, x, weight, bias, project_values)
        backward(out, q, x, weight, attention, project_values)
    finally:
        temporal_kernels.launch = launch
    return recorded


def compiled(call: Any, arch: int) -> Compiled:
    kernel, _, args, constants, warps = call
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: _type(x) for name, x in zip(names, args, strict=True)}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {
        path: [["tt.divisibility", 16]]
        for name, x in zip(names, args)
        for path, leaf in _leaves(x, (kernel.arg_names.index(name),))
        if isinstance(leaf, Tensor) or (type(leaf) is int and leaf % 16 == 0)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": 1}
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = _assembled(binary.asm["ptx"], arch)
    return Compiled(kernel.__name__, registers, spilled, binary.metadata.shared)


def _type(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_type, x))
    if isinstance(x, Tensor):
        return TYPES[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"


def _leaves(x: Any, path: tuple[int, ...]) -> list[tuple[tuple[int, ...], Any]]:
    if not isinstance(x, tuple):
        return [(path, x)]
    return [leaf for i, part in enumerate(x) for leaf in _leaves(part, (*path, i))]


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Registers of a thread and bytes spilled, by the assembler of Triton's own wheel."""
    programs = Path(triton.__file__).parent / "backends/nvidia/bin"
    program = programs / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(program), "-v", "--gpu-name", name, "-o", f"{path}.o", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", report)
    assert used is not None, report
    return int(used.group(1)), sum(map(int, re.findall(r"(\d+) bytes spill", report)))
