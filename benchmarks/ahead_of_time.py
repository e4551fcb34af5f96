"""Ahead-of-time compilation of the kernels: registers, spills, shared memory.

Triton can compile for a GPU that is not present, and ships NVIDIA's assembler ptxas, which reports
the resources of a kernel. The kernels are compiled, not run.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from slowfast_lara.attention.kernels.tiles import FRAME_GROUP, block_size, tile

ARCHS = (80, 90, 100)
# Smallest limit of the supported GPUs (compute capability 8.6, 8.9 and 12.0), in bytes per program.
SHARED_MEMORY = 101376
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}

_COMBINE = ("forward", "backward_queries", "backward_samples", "backward_means")
# Kernel name in tiles.py -> (triton_*.py file, Triton function if its name differs, its constants).
KERNELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "segment_sums": ("landmarks", "", {"MEANS": True}),
    "farthest_of_segment": ("landmarks", "", {}),
    "segment_backward": ("landmarks", "", {"MEANS": True}),
    "proposals_forward": ("proposals", "", {"NOISE": True, "PRECISION": "ieee"}),
    "proposals_backward": (
        "proposals",
        "",
        {"NOISE": True, "LANDMARKS": True, "PRECISION": "ieee"},
    ),
    "key_stats_forward": ("key_stats", "", {"VALUES": True, "NORMS": True}),
    "query_normaliser": ("key_stats", "key_stats_forward", {"VALUES": False, "NORMS": False}),
    "key_stats_backward_keys": ("key_stats", "", {"VALUES": True, "NORMS": True, "TIED": False}),
    "key_stats_backward_tied": (
        "key_stats",
        "key_stats_backward_keys",
        {"VALUES": True, "NORMS": False, "TIED": True, "F": 1},
    ),
    "query_normaliser_backward": (
        "key_stats",
        "key_stats_backward_keys",
        {"VALUES": False, "NORMS": False, "TIED": False},
    ),
    "key_stats_backward_samples": ("key_stats", "", {"NORMS": True}),
    "combine_forward": ("combine", "", {"ALIGNED": True}),
    "combine_backward_queries": ("combine", "", {"ALIGNED": True}),
    "combine_backward_samples": ("combine", "", {"ALIGNED": True}),
    "combine_backward_means": ("combine", "", {"ALIGNED": True, "GROUP": FRAME_GROUP}),
    "query_moments": ("group_means", "", {}),
    "choose_groups": ("groups", "", {"BLOCK_P": 1024, "BLOCK_R": 64, "BLOCK_Z": 32}),
    "group_means_backward": ("group_means", "", {}),
    "attend_forward": ("group_attention", "", {}),
    "attend_backward_groups": ("group_attention", "", {}),
    "attend_backward_queries": ("group_attention", "", {}),
    "temporal_scores": ("temporal", "", {"PROJECT": True, "EPILOGUE": "softmax"}),
    "temporal_pool": ("temporal", "", {"BIAS": True}),
    "temporal_sum": ("temporal", "", {}),
    "temporal_backward_tokens": ("temporal", "", {"PROJECT": True}),
    "temporal_backward_weight": ("temporal", "", {}),
}
# The kernels of `merged`, which support neither float32 nor more than 128 groups.
GROUP_KERNELS = (
    "query_moments",
    "choose_groups",
    "group_means_backward",
    "attend_forward",
    "attend_backward_groups",
    "attend_backward_queries",
)
# Further variants to compile: the kernel, and its constants that differ from KERNELS.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("segment_sums", {"MEANS": False}),
    ("segment_backward", {"MEANS": False}),
    ("proposals_forward", {"NOISE": False}),
    ("proposals_backward", {"NOISE": False, "LANDMARKS": False}),
    ("key_stats_forward", {"NORMS": False, "F": 1}),
    ("key_stats_backward_samples", {"NORMS": False, "F": 1}),
    *((f"combine_{name}", {"ALIGNED": False}) for name in _COMBINE),
    *((f"combine_{name}", {"F": 1}) for name in _COMBINE),
    ("combine_backward_samples", {"BLOCK_F": 32}),
    ("combine_backward_samples", {"BLOCK_F": 64}),
    ("choose_groups", {"BLOCK_P": 256}),
    ("choose_groups", {"F": 1}),
    ("temporal_scores", {"EPILOGUE": "gradient"}),
    ("temporal_scores", {"EPILOGUE": "gradient", "PROJECT": False}),
    *(
        ("temporal_scores", {"BLOCK_F": 32, "EPILOGUE": epilogue})
        for epilogue in ("softmax", "gradient", "")
    ),
    ("temporal_scores", {"BLOCK_F": 32, "EPILOGUE": "gradient", "PROJECT": False}),
    ("temporal_pool", {"BIAS": False}),
    ("temporal_backward_tokens", {"PROJECT": False}),
]
# Arguments that point to float32 tensors, whatever the dtype of q, k and v.
_WIDE = re.compile(
    r"d?(w|L|landmarks|columns|scores)_ptr"
    r"|(log_z|peak|balance|gain|shares|stats|partial|minus_R|attention|coeffs|sums)_ptr"
    r"|mean_sums_ptr"
    r"|d?biases_ptr|(moments|top|means|norms|nearness|dr|t)_ptr"
)
# (kernel, argument): the argument points to a float32 tensor in this kernel, but not in others.
_WIDE_IN_KERNEL = {
    ("segment_sums", "out_ptr"),
    ("farthest_of_segment", "out_ptr"),
    ("segment_backward", "grad_ptr"),
    ("temporal_scores", "out_ptr"),
    ("combine_backward_queries", "dq_ptr"),
    ("query_normaliser_backward", "dv_ptr"),
}


class Usage(NamedTuple):
    """Registers per thread, spilled bytes, and bytes of shared memory of a compiled kernel."""

    registers: int
    spills: int
    shared: int


def usage(name: str, arch: int, dtype: str, *, d: int = 0, C: int = 0, **changes: Any) -> Usage:
    """Resources of a kernel compiled for `arch` (80 is sm_80); `changes` override its constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(name)
    chosen = tile(name, element_size=DTYPES[dtype], d=d, C=C)
    options = {key: chosen.pop(key) for key in ("num_warps", "num_stages")}
    sizes = {"D": d, "BLOCK_D": block_size(d), "BLOCK_F": 16}
    precision = "ieee" if dtype == "fp32" else "tf32"
    constants = {**sizes, "PRECISION": precision, **chosen, **KERNELS[name][2], **changes}
    constants = {key: value for key, value in constants.items() if key in function.arg_names}
    signature = {
        key: "constexpr" if key in constants else _type(name, key, dtype)
        for key in function.arg_names
    }
    # As in a real launch, pointers, strides and C are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, key in enumerate(function.arg_names)
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
        return "fp32" if key in ("scale", "global_share", "values") else "i32"
    if key in ("chosen_ptr", "groups_ptr"):
        return "*i32"
    wide = kernel.startswith("proposals") or bool(_WIDE.fullmatch(key))
    wide |= (kernel, key) in _WIDE_IN_KERNEL
    return "*fp32" if wide else f"*{dtype}"


@functools.cache
def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Assemble PTX code; returns registers per thread and spilled bytes."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = folder / ("ptxas" if arch < 100 else "ptxas-blackwell")
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler, "-v", "--gpu-name", target[1], "-o", f"{source}.o", source]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers is not None and spills
    return int(registers[1]), sum(map(int, spills))
