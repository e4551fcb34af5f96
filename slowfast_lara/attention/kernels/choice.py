"""Whether a layer computes with PyTorch's operations or with our Triton kernels.

`torch` and `triton` say so. `auto` takes Triton on an NVIDIA GPU that its kernels are made for,
after they were seen there to give what PyTorch's operations give (self_check.py), and falls
back to PyTorch without a word where there is no kernel. Triton itself is imported only when a
kernel runs: GPU builds of PyTorch bring it, and nothing else needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slowfast_lara.attention.exporting import is_exporting

Kernels = Literal["auto", "torch", "triton"]
KERNELS = get_args(Kernels)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 128
MOST_SAMPLES = 256
LEAST_CAPABILITY = (8, 0)


def missing_sizes(head_dim: int, num_samples: int) -> str:
    """What keeps the kernels of LARA and Performer from these sizes, or nothing."""
    if head_dim > LARGEST_HEAD:
        return f"heads of more than {LARGEST_HEAD} numbers ({head_dim})"
    if num_samples > MOST_SAMPLES:
        return f"more than {MOST_SAMPLES} landmarks or samples ({num_samples})"
    return ""


def takes_triton(choice: str, x: Tensor, missing: str = "") -> bool:
    """Whether kernels are to work on tensors like x; `missing`: what there is no kernel for."""
    if choice == "torch" or is_exporting():
        return False
    if x.dtype not in DTYPES:
        missing = missing or str(x.dtype).removeprefix("torch.")
    if choice == "auto":
        return not missing and x.device.type == "cuda" and _trusted(x)
    if missing:
        raise ValueError(f"kernels='triton': there is no kernel for {missing}; 'auto' does without")
    # On the meta device and with fake tensors nothing runs.
    if x.device.type != "meta" and not isinstance(x, FakeTensor):
        problem = _obstacle(x.device.type, x.device.index)
        if interpreted() and x.dtype == torch.bfloat16:
            problem = problem or "Triton's interpreter multiplies bfloat16 wrongly"
        if problem:
            raise ValueError(f"kernels='triton': {problem}; 'auto' and 'torch' do without")
    return True


def _trusted(x: Tensor) -> bool:
    if isinstance(x, FakeTensor):  # nothing can be tried here
        return not _obstacle("cuda", x.device.index)
    return _seen_to_work(x.device.index, str(x.dtype))


def _answer_for_compile(function: Callable) -> Callable:
    """torch.compile shall take its answer as it is, and not look into how it is found.

    What torch.compiler.assume_constant_result does, without importing the compiler at every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_answer_for_compile
def _seen_to_work(index: int, dtype: str) -> bool:
    from slowfast_lara.attention.kernels.self_check import works_here

    name = dtype.removeprefix("torch.")
    return works_here(torch.device("cuda", index), getattr(torch, name))


@_answer_for_compile
def _obstacle(device_type: str, index: int | None) -> str:
    """Why Triton's kernels cannot run on a device, or nothing."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return ""
    if torch.version.hip is not None:
        return "they run on NVIDIA GPUs, and this PyTorch is for AMD's"
    if device_type != "cuda" or not torch.cuda.is_available():
        return (
            f"they run on NVIDIA GPUs, not on the device {device_type!r} without TRITON_INTERPRET=1"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return f"they need a GPU of compute capability {least} or more, this one has {found}"
    return ""


def obstacle(device: torch.device) -> str:
    return _obstacle(device.type, device.index)


def interpreted() -> bool:
    """Whether Triton is to run kernels in Python, on any device: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
