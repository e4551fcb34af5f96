"""Tensor helpers shared by the estimators: frames, scaling, precision, export."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# True while torch.export or the ONNX exporter traces a model. Code that loops over chunks, or has
# its own backward pass, then runs plain operations on the whole batch: a loop would fix the batch
# size in the exported program, and inference needs no backward pass.
is_exporting = torch.compiler.is_exporting


def split_frames(x: Tensor, num_frames: int) -> Tensor:
    """Split frame-major tokens into frames: [B,h,F*P,d] -> [B,h,F,P,d]."""
    if num_frames < 1 or x.shape[2] % num_frames:
        raise ValueError(f"{x.shape[2]} tokens cannot be split into {num_frames} equal frames")
    return x.unflatten(2, (num_frames, -1))


def scaled(x: Tensor) -> Tensor:
    """x * d**-0.25. If q and k are both scaled this way, q.k is the usual attention logit."""
    return x * x.shape[-1] ** -0.25


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Select tokens: x [...,M,d] at the indices [...,C,1] -> [...,C,d]."""
    return x.gather(-2, index.expand(*index.shape[:-1], x.shape[-1]))


def index_tensor(numbers: Sequence[int], device: torch.device) -> Tensor:
    # With FakeTensorMode, torch.tensor on the meta device would not return a fake tensor.
    # On a GPU, a blocking copy would wait until all launched kernels have run.
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=device.type == "cuda")


def largest(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The `number` largest elements of x [...,P] and their indices; ties: lower index first."""
    # ONNX has no stable sort. Its TopK returns ties in this order; PyTorch's topk may not.
    if is_exporting():
        return x.topk(number, dim=-1)
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :number], indices[..., :number]


def to_float32(value: Any) -> Any:
    """Convert a float16 or bfloat16 tensor to float32; return any other value unchanged."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if device_type == "meta":  # the meta device has no autocast
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def at_least_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: compute in float32 or float64 without autocast; the result has the dtype of q.

    In bfloat16, the exponential of a large sum has no correct digits. `function` is a function or
    a method whose first tensor argument is q.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        q = args[0] if isinstance(args[0], Tensor) else args[1]
        with without_autocast(q.device.type):
            kwargs = {name: to_float32(value) for name, value in kwargs.items()}
            return function(*map(to_float32, args), **kwargs).to(q.dtype)

    return wrapper
