"""How the operators start their kernels: one row of programs, on the device of the tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.tiles import tile


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is not below n, and that products of tensor cores take."""
    return max(16, 1 << (n - 1).bit_length())


def precision() -> str:
    """How float32 is multiplied: as PyTorch's own products on a GPU are."""
    matmul = torch.backends.cuda.matmul
    # Newer versions of PyTorch have a word in place of the flag, and refuse a mixture of both.
    word = getattr(matmul, "fp32_precision", None)
    return "tf32" if (matmul.allow_tf32 if word is None else word == "tf32") else "ieee"


def tile_for(kernel: str, x: Tensor, **sizes: int) -> dict[str, int]:
    """The tile of a kernel for tensors like x."""
    return tile(kernel, element_size=x.element_size(), **sizes)


def run(kernel: Any, programs: int, like: Tensor, *args: Any, **constants: Any) -> None:
    """Start a Triton kernel where the tensor `like` is."""
    with torch.cuda.device_of(like):
        kernel[(programs,)](*args, **constants)


def rows_in_place(x: Tensor) -> Tensor:
    """Kernels take any strides but that of the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
