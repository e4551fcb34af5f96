"""Launching of Triton kernels; the first launch imports Triton."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.tiles import block_size, tile


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def interpreted() -> bool:
    """Whether Triton interprets kernels in Python, on any device (slow, for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def matmul_precision() -> str:
    """Precision of float32 matmuls, "tf32" or "ieee", from PyTorch's setting for CUDA matmuls."""
    matmul = torch.backends.cuda.matmul
    # Newer PyTorch versions have the string `fp32_precision`, and refuse to mix it with allow_tf32.
    setting = getattr(matmul, "fp32_precision", None)
    return "tf32" if (matmul.allow_tf32 if setting is None else setting == "tf32") else "ieee"


def launch(
    kernel: str,
    on: Tensor,
    *args: Any,
    programs: int,
    blocks: dict[str, int] | None = None,
    tile_of: str = "",
    d: int = 0,
    C: int = 0,
    **constants: Any,
) -> None:
    """Launch a Triton kernel on a one-dimensional grid, on the device of the tensor `on`.

    Args:
        kernel: FILE.FUNCTION, for a function in triton_FILE.py.
        args: run-time arguments.
        programs: size of the grid, without the factors from `blocks`.
        blocks: lengths of axes that are split: {"N": 100} for 100 queries in blocks of BLOCK_N.
        tile_of: name of the tile in tiles.py if it is not FUNCTION.
        d: head size, passed as D and BLOCK_D if given.
        C: number of samples, for the choice of the tile.
        constants: compile-time arguments in addition to the tile.
    """
    file, name = kernel.split(".")
    function = getattr(import_module(f"slowfast_lara.attention.kernels.triton_{file}"), name)
    if d:
        constants = {"D": d, "BLOCK_D": block_size(d), **constants}
    if "PRECISION" in function.arg_names:
        constants["PRECISION"] = matmul_precision()
    constants = {**tile(tile_of or name, element_size=on.element_size(), d=d, C=C), **constants}
    for axis, size in (blocks or {}).items():
        programs *= cdiv(size, constants[f"BLOCK_{axis}"])
    with torch.cuda.device_of(on):
        function[(programs,)](*args, **constants)


def with_unit_stride(x: Tensor) -> Tensor:
    """x, or a contiguous copy if its last stride is not 1; the other strides may have any value."""
    return x if x.stride(-1) == 1 else x.contiguous()
