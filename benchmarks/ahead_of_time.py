"""Compiling the kernels for GPUs that are not here: registers, spills, shared memory.

Triton compiles for any target, and brings NVIDIA's assembler, which says what a kernel
takes. Nothing runs.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from slowfast_lara.attention.kernels.launch import power_of_two
from slowfast_lara.attention.kernels.tiles import FRAME_GROUP, tile

ARCHS = (80, 90, 100)
# The most shared memory that a program may ask for, in bytes: GPUs of 8.6, 8.9 and 12.0 have least.
SHARED_MEMORY = 101376
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}

_MIX = ("forward", "backward_queries", "backward_samples", "backward_means")
# By the names of tiles.py: the file of the Triton function, its name if it is another, and
# what is fixed in it.
KERNELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "segment_sums": ("landmarks", "", {"MEANS": True}),
    "farthest_of_segment": ("landmarks", "", {}),
    "spread_over_segments": ("landmarks", "", {"MEANS": True}),
    "proposals_forward": ("proposals", "", {"NOISE": True, "PRECISION": "ieee"}),
    "proposals_backward": (
        "proposals",
        "",
        {"NOISE": True, "LANDMARKS": True, "PRECISION": "ieee"},
    ),
    "seen_forward": ("seen", "", {"VALUES": True, "NORMS": True}),
    "column_sums": ("seen", "seen_forward", {"VALUES": False, "NORMS": False}),
    "seen_backward_keys": ("seen", "", {"VALUES": True, "NORMS": True, "SAME": False}),
    "seen_backward_same": (
        "seen",
        "seen_backward_keys",
        {"VALUES": True, "NORMS": False, "SAME": True, "F": 1},
    ),
    "column_gradient": (
        "seen",
        "seen_backward_keys",
        {"VALUES": False, "NORMS": False, "SAME": False},
    ),
    "seen_backward_samples": ("seen", "", {"NORMS": True}),
    "mix_forward": ("mix", "", {"FAVOURED": True}),
    "mix_backward_queries": ("mix_backward", "", {"FAVOURED": True}),
    "mix_backward_samples": ("mix_backward", "", {"FAVOURED": True}),
    "mix_backward_means": ("mix_backward", "", {"FAVOURED": True, "GROUP": FRAME_GROUP}),
    "temporal_scores": ("temporal", "", {"PROJECT": True, "THEN": "softmax"}),
    "temporal_pool": ("temporal", "", {"BIAS": True}),
    "temporal_sum": ("temporal", "", {}),
    "temporal_spread": ("temporal", "", {"PROJECT": True}),
    "temporal_weight": ("temporal", "", {}),
}
# Other forms of them: what is fixed in another way.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("segment_sums", {"MEANS": False}),
    ("spread_over_segments", {"MEANS": False}),
    ("proposals_forward", {"NOISE": False}),
    ("proposals_backward", {"NOISE": False, "LANDMARKS": False}),
    ("seen_forward", {"NORMS": False, "F": 1}),
    ("seen_backward_samples", {"NORMS": False, "F": 1}),
    *((f"mix_{name}", {"FAVOURED": False}) for name in _MIX),
    *((f"mix_{name}", {"F": 1}) for name in _MIX),
    ("mix_backward_samples", {"BLOCK_F": 32}),
    ("mix_backward_samples", {"BLOCK_F": 64}),
    ("temporal_scores", {"THEN": "gradient"}),
    ("temporal_scores", {"THEN": "gradient", "PROJECT": False}),
    *(("temporal_scores", {"BLOCK_F": 32, "THEN": then}) for then in ("softmax", "gradient", "")),
    ("temporal_scores", {"BLOCK_F": 32, "THEN": "gradient", "PROJECT": False}),
    ("temporal_pool", {"BIAS": False}),
    ("temporal_spread", {"PROJECT": False}),
]
# Pointers to float32 whatever the precision of q, k and v.
_WIDE = re.compile(
    r"(grad_)?(w|log_sums|landmarks|numbers|scores)_ptr"
    r"|(column_sums|largest|base|gain|share|rows|parts|pull|attention|over_frames|sums)_ptr"
    r"|mean_sums_ptr"
)
# Others that are float32 in one kernel: two gradients of the queries are collected in it.
_WIDE_THERE = {
    ("segment_sums", "out_ptr"),
    ("farthest_of_segment", "out_ptr"),
    ("spread_over_segments", "grad_ptr"),
    ("temporal_scores", "out_ptr"),
    ("mix_backward_queries", "grad_q_ptr"),
    ("column_gradient", "grad_v_ptr"),
}


class Usage(NamedTuple):
    """What a compiled kernel takes: registers of a thread, and bytes."""

    registers: int
    spills: int
    shared: int


def usage(name: str, arch: int, dtype: str, *, d: int = 0, C: int = 0, **changes: Any) -> Usage:
    """Compile one kernel for a target, such as 80 for sm_80, in the form of some `changes`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(name)
    chosen = tile(name, element_size=DTYPES[dtype], d=d, C=C)
    options = {key: chosen.pop(key) for key in ("num_warps", "num_stages")}
    whole = {"D": d, "BLOCK_D": power_of_two(d), "BLOCK_C": power_of_two(C), "BLOCK_F": 16}
    precision = "ieee" if dtype == "fp32" else "tf32"
    constants = {**whole, "PRECISION": precision, **chosen, **KERNELS[name][2], **changes}
    constants = {key: value for key, value in constants.items() if key in function.arg_names}
    signature = {
        key: "constexpr" if key in constants else _type(name, key, dtype)
        for key in function.arg_names
    }
    # What a launch would find: pointers and strides are multiples of 16.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, key in enumerate(function.arg_names)
        if key not in constants and (key.endswith("_ptr") or "_" in key or key == "C")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Usage(*_assembled(compiled.asm["ptx"], arch), compiled.metadata.shared)


def _function(name: str) -> Any:
    file, other_name, _ = KERNELS[name]
    module = import_module(f"slowfast_lara.attention.kernels.triton_{file}")
    return getattr(module, other_name or name)


def _type(kernel: str, key: str, dtype: str) -> str:
    if not key.endswith("_ptr"):
        return "fp32" if key in ("scale", "towards_all") else "i32"
    if key == "chosen_ptr":
        return "*i32"
    wide = kernel.startswith("proposals") or bool(_WIDE.fullmatch(key))
    wide |= (kernel, key) in _WIDE_THERE
    return "*fp32" if wide else f"*{dtype}"


@functools.cache
def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Registers of a thread and bytes of spills, as NVIDIA's assembler says."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = folder / ("ptxas" if arch < 100 else "ptxas-blackwell")
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler, "-v", "--gpu-name", target[1], "-o", f"{source}.o", source]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill", said)
    assert registers is not None and spills
    return int(registers[1]), sum(map(int, spills))
