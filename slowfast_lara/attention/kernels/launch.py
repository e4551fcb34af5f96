"""Kernel launches on a one-dimensional grid, on the device of the tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.tiles import tile


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def block_size(n: int) -> int:
    """The smallest power of two >= n, and at least 16, the smallest side of a Triton matmul."""
    return max(16, 1 << (n - 1).bit_length())


def matmul_precision() -> str:
    """Precision of float32 matmuls, as PyTorch's own on a GPU: "tf32" or "ieee"."""
    matmul = torch.backends.cuda.matmul
    # Newer PyTorch versions have a string setting and refuse to mix it with the flag.
    setting = getattr(matmul, "fp32_precision", None)
    return "tf32" if (matmul.allow_tf32 if setting is None else setting == "tf32") else "ieee"


def tile_for(kernel: str, x: Tensor, **sizes: int) -> dict[str, int]:
    """Tile of a kernel for the element size of x."""
    return tile(kernel, element_size=x.element_size(), **sizes)


def launch(kernel: Any, programs: int, on: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a Triton kernel on the device of the tensor `on`."""
    with torch.cuda.device_of(on):
        kernel[(programs,)](*args, **constants)


def with_unit_stride(x: Tensor) -> Tensor:
    """x, copied if its last dimension has a stride: kernels accept any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
