"""Launching of Triton kernels; the first launch imports Triton."""

from __future__ import annotations

import os
import tempfile
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
    # Newer PyTorch versions have `fp32_precision`. Once it is set, reading allow_tf32 may fail.
    setting = getattr(matmul, "fp32_precision", None)
    return "tf32" if (matmul.allow_tf32 if setting is None else setting == "tf32") else "ieee"


def use_local_triton_cache() -> None:
    """Set Triton's cache folder to a local disk of the node, unless TRITON_CACHE_DIR is set.

    Triton's default is the home folder, which clusters share among nodes. Processes that compile
    the same kernel there may read each other's incomplete files (triton-lang/triton#11512).
    """
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    user = os.getuid()  # not available on Windows, for which Triton has no GPU builds
    folder = os.path.join(tempfile.gettempdir(), f"slowfast_lara_triton_{user}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != user:
        folder = tempfile.mkdtemp()  # another user owns the folder and could plant code in it
    os.environ["TRITON_CACHE_DIR"] = folder


def triton_function(kernel: str) -> Any:
    """Import FUNCTION from triton_FILE.py, for `kernel` = "FILE.FUNCTION"."""
    use_local_triton_cache()
    file, name = kernel.split(".")
    return getattr(import_module(f"slowfast_lara.attention.kernels.triton_{file}"), name)


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
        programs: size of the grid; multiplied by the number of blocks of each axis in `blocks`.
        blocks: axes to split, with their lengths: {"N": 100} is 100 queries in blocks of BLOCK_N.
        tile_of: name of the tile in tiles.py, FUNCTION by default.
        d: head size; if not 0, it is passed as D, and rounded up by `block_size` as BLOCK_D.
        C: number of samples or groups, on which the tile depends.
        constants: compile-time arguments in addition to those of the tile, or in their place.
    """
    function, name = triton_function(kernel), kernel.split(".")[1]
    if d:
        constants = {"D": d, "BLOCK_D": block_size(d), **constants}
    if "PRECISION" in function.arg_names:
        constants["PRECISION"] = matmul_precision()
    constants = {**tile(tile_of or name, element_size=on.element_size(), d=d, C=C), **constants}
    for axis, size in (blocks or {}).items():
        programs *= cdiv(size, constants[f"BLOCK_{axis}"])
    with torch.cuda.device_of(on):
        function[(programs,)](*args, **constants)


def sum_parts(partial: Tensor) -> Tensor:
    """Sum over the partial sums in dimension 2; a view if there is only one."""
    return partial[:, :, 0] if partial.shape[2] == 1 else partial.sum(2)


def with_unit_stride(x: Tensor) -> Tensor:
    """x, or a contiguous copy if its last stride is not 1; the other strides may have any value."""
    return x if x.stride(-1) == 1 else x.contiguous()
