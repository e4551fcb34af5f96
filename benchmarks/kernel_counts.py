"""Launches, bytes and FLOPs of a function on a GPU, counted on the meta device.

Meta tensors have shapes and no data. For them, the package takes the code path for NVIDIA GPUs. The
counter records every operator that PyTorch dispatches. Its cost model assumes that an operator
reads each input from memory once and writes each output once. Views and dimensions with stride 0
are free.

On the meta device PyTorch would decompose `scaled_dot_product_attention`. The counter therefore
replaces it by the operator that runs on a GPU: flash attention in half precision without a mask,
otherwise memory-efficient attention, or matmuls for sizes that neither supports. kernel_traffic.py
models the package's own Triton kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernel_traffic import OPERATORS

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)

# Operators that allocate or inspect memory without moving data.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
_FREE |= {"_unsafe_view", "_reshape_alias"}
# Operators that overwrite a tensor without reading it.
_FILL = {"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "zeros_like", "ones_like"}
_FILL |= {"randn_like", "rand_like", "new_full", "new_zeros", "new_ones", "full_like"}


class Kernel(NamedTuple):
    """Launches, memory traffic and FLOPs of one operator."""

    name: str
    launches: int
    bytes: int
    flops: int
    half: bool  # whether the FLOPs are in half precision


def count_kernels(function: Callable[[], Any]) -> tuple[list[Kernel], Any]:
    """Call a function of meta tensors; returns its kernels and its result."""
    counter = _Counter()
    with GpuAttention(), counter:
        result = function()
    return counter.kernels, result


class GpuAttention(TorchFunctionMode):
    """Replaces scaled_dot_product_attention by the operator that it calls on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.scaled_dot_product_attention:
            return gpu_attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def gpu_backend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> str:
    """The backend that PyTorch chooses on an NVIDIA GPU without cuDNN: flash, efficient or math."""
    if any(x.ndim != 4 or x.stride(-1) != 1 for x in (q, k, v)):
        return "math"
    if q.dtype in HALF and attn_mask is None and q.shape[-1] == v.shape[-1] <= 256:
        return "flash"
    aligned = 8 if q.dtype in HALF else 4
    if q.shape[-1] % aligned or v.shape[-1] % aligned or q.dtype not in (*HALF, torch.float32):
        return "math"
    return "efficient"


def gpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Run scaled_dot_product_attention with the backend that `gpu_backend` returns."""
    backend = gpu_backend(q, k, v, attn_mask)
    if backend == "flash":
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        width = v.shape[-1]
        q, k, v = (functional.pad(x, (0, -width % 8)) if width % 8 else x for x in (q, k, v))
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, False, scale=scale)[0]
        return out[..., :width]
    if backend == "math":
        return functional.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, scale=scale)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    options = {"dropout_p": dropout_p, "is_causal": False, "scale": scale}
    return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, **options)[0]


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        fused = OPERATORS.get(f"{function.namespace}::{name}")
        if fused is not None:
            half = args[0].dtype in HALF or args[1].dtype in HALF
            self.kernels += [Kernel(k, 1, moved, flops, half) for k, moved, flops in fused(*args)]
        elif not function.is_view and name not in _FREE:
            given = {key: value for key, value in kwargs.items() if key != "out"}
            self.kernels += _kernel(name, _tensors((args, given)), _tensors(result))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _kernel(name: str, given: list[Tensor], made: list[Tensor]) -> Iterable[Kernel]:
    if not made or name == "copy_" and _same_memory(*given[:2]):
        return []
    read = given[1:] if name in _FILL else given
    if name in ("gather", "index_select"):  # these read only the selected elements
        read = [*given[1:], *made]
    size = sum(map(_bytes, {id(x): x for x in read}.values())) + sum(map(_bytes, made))
    launches, flops = 1, 0
    if name in ("mm", "bmm", "addmm", "baddbmm", "baddbmm_"):
        left, right = given[-2:]
        flops = 2 * left.numel() * right.shape[-1]
        if name == "baddbmm":  # first copies argument 0 into the output
            launches, size = 2, size + _bytes(given[0]) + _bytes(made[0])
    elif name == "constant_pad_nd":  # fills the output, then copies the input
        launches, size = 2, size + sum(map(_bytes, made))
    elif "attention" in name:
        launches, extra, flops = _attention_costs(name, given)
        size += extra
    half = bool(given) and given[0].dtype in HALF
    return [Kernel(name, launches, size, flops, half)]


def _attention_costs(name: str, given: list[Tensor]) -> tuple[int, int, int]:
    """Launches, bytes of scratch memory traffic, and FLOPs of a fused attention operator."""
    backward = name.endswith("backward")
    q, k, v = given[1:4] if backward else given[:3]
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    if not backward:
        return 1, 0, 2 * pairs * (q.shape[-1] + v.shape[-1])
    # A first kernel multiplies the outputs by their gradients. The main kernel accumulates the
    # gradient of q over blocks of 128 keys, in a float32 buffer in global memory. Flash attention
    # passes over the buffer three times: to zero it, to add to it, and to convert it (in a separate
    # kernel). Memory-efficient attention reads and writes the buffer for every block but the last.
    passes = 3 if "flash" in name else 2 * (-(-k.shape[-2] // 128) - 1)
    launches = 3 if "flash" in name else 2
    return launches, passes * 4 * q.shape.numel(), 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and (
        a.storage_offset(),
        a.shape,
        a.stride(),
    ) == (b.storage_offset(), b.shape, b.stride())


def _bytes(x: Tensor) -> int:
    """Bytes of the distinct elements: a dimension with stride 0 counts as size 1."""
    sizes = (size for size, stride in zip(x.shape, x.stride()) if stride)
    return math.prod(sizes) * x.element_size()
