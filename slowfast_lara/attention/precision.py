"""Float32 inside, whatever comes in.

Exponentials of sums lose everything in 8 bits of mantissa, so estimators work in
float32 (or float64, if given that) even under autocast.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def at_least_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: tensors are to_float32, autocast is off inside, the result is as q.

    For a function or method whose first tensor is q.
    """

    @functools.wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Tensor:
        q = args[0] if isinstance(args[0], Tensor) else args[1]
        with without_autocast(q.device.type):
            wide_kwargs = {name: to_float32(value) for name, value in kwargs.items()}
            return function(*map(to_float32, args), **wide_kwargs).to(q.dtype)

    return wide


def to_float32(value: Any) -> Any:
    """A tensor of half precision in float32; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()  # the meta device has none
