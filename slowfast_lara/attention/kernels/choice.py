"""Choice between PyTorch's operations and the Triton kernels.

The option `kernels` is `torch`, `triton` or `auto`. `triton` raises an error if the Triton
kernels cannot run. `auto` selects Triton for half-precision inputs on an NVIDIA GPU if a
measurement with the same shapes, except for the batch size, shows that the kernels agree with
PyTorch and are faster (verdicts.py). In float32, `auto` always selects PyTorch.

build_model collects the operators and shapes of a model, and `decide` chooses their kernels in
advance. For any other operator or shape, the choice is made when it first runs; if it first runs
while torch.compile traces, `auto` selects PyTorch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor

from slowfast_lara.attention.kernels import verdicts
from slowfast_lara.attention.kernels.launch import interpreted
from slowfast_lara.attention.kernels.verdicts import Call, Verdict
from slowfast_lara.attention.tensors import is_exporting

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "torch", "triton"]
KERNELS = get_args(Kernels)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 128
MAX_SAMPLES = 256
MIN_CAPABILITY = (8, 0)

# Choices of `auto`: (device, *Call.key()) -> whether Triton is used.
DECISIONS: dict[tuple[Any, ...], bool] = {}
# Invocations on the meta device; None unless `recorded_calls` is active.
_RECORDED: list[Call] | None = None


def unsupported_sizes(head_dim: int, num_samples: int) -> str:
    """Description of a size that LARA's and Performer's kernels do not support, "" if none."""
    if head_dim > MAX_HEAD_DIM:
        return f"a head size above {MAX_HEAD_DIM} ({head_dim})"
    if num_samples > MAX_SAMPLES:
        return f"more than {MAX_SAMPLES} landmarks or samples ({num_samples})"
    return ""


def uses_triton(
    kernels: str,
    operator: str,
    tensors: Sequence[Tensor | None],
    options: dict[str, Any] | None = None,
    unsupported: str = "",
) -> bool:
    """Whether an operator uses its Triton kernels for the given inputs.

    Args:
        operator, tensors, options: fields of verdicts.Call; with options=None, "auto" is PyTorch.
        unsupported: description of an input that the kernels do not support, or "".

    Raises:
        ValueError: `kernels` is "triton", but the kernels cannot run.
    """
    x = tensors[0]
    assert x is not None
    if kernels == "torch" or is_exporting():
        return False
    if x.dtype not in DTYPES:
        unsupported = unsupported or str(x.dtype).removeprefix("torch.")
    if kernels == "auto":
        if unsupported or x.dtype not in HALF or x.device.type not in ("cuda", "meta"):
            return False
        return options is not None and _decision(Call(operator, options, tensors))
    if unsupported:
        raise ValueError(f"kernels='triton' does not support {unsupported}; use 'auto' or 'torch'")
    # Skip the check where no kernel runs: meta device, fake tensors, torch.compile tracing.
    if not (torch.compiler.is_compiling() or x.device.type == "meta" or isinstance(x, FakeTensor)):
        problem = obstacle(x.device)
        if interpreted() and x.dtype == torch.bfloat16:
            problem = problem or "Triton's interpreter computes wrong bfloat16 matmuls"
        if problem:
            raise ValueError(f"kernels='triton' cannot run: {problem}; use 'auto' or 'torch'")
    return True


def _decision(call: Call) -> bool:
    x = call.first
    if x.device.type == "meta":
        if _RECORDED is not None:
            _RECORDED.append(call)
        return False
    key = (x.device, *call.key())
    # Nothing can be measured while torch.compile traces, or with fake tensors.
    if key not in DECISIONS and not (torch.compiler.is_compiling() or isinstance(x, FakeTensor)):
        decide([call], x.device)
    return DECISIONS.get(key, False)


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Collect the operator calls that a model with kernels="auto" makes on the meta device."""
    global _RECORDED
    calls: list[Call] = []
    _RECORDED = calls
    try:
        yield calls
    finally:
        _RECORDED = None


def decide(calls: Sequence[Call], device: torch.device, *, all_ranks: bool = False) -> None:
    """Choose the kernels for `calls` on a device, and log a table of the choices.

    If Triton kernels cannot run on the device, the choice is PyTorch, and only the reason is
    logged. If `all_ranks`, all ranks of the process group must call this function with the same
    `calls`. Only rank 0 measures. On each node, one rank then compiles the chosen kernels, and the
    other ranks load them from Triton's cache.
    """
    # Calls with one key may have different batches: measure the first, which is for training.
    calls = list({call.key(): call for call in reversed(calls)}.values())[::-1]
    if reason := obstacle(device):
        logger.info("Using PyTorch kernels on %s: %s", device, reason)
        found = [Verdict(problem=reason)] * len(calls)
    elif all_ranks and distributed.is_initialized() and distributed.get_world_size() > 1:
        message: list[Any] = [None]
        if distributed.get_rank() == 0:
            message[0] = verdicts.of_calls(calls, device)
        distributed.broadcast_object_list(message)
        found = message[0]
        local_rank = os.environ.get("LOCAL_RANK", device.index)
        if int(local_rank or 0) == 0:
            verdicts.compile_kernels(
                [call for call, verdict in zip(calls, found) if verdict.triton], device
            )
        distributed.barrier()
    else:
        found = verdicts.of_calls(calls, device)
    if not reason:
        logger.info("%s", verdicts.table(calls, found, device))
    for call, verdict in zip(calls, found):
        DECISIONS[(device, *call.key())] = verdict.triton


def obstacle(device: torch.device) -> str:
    """Reason why Triton kernels cannot run on a device, "" if they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if interpreted():
        return ""
    if torch.version.hip is not None:
        return "the kernels need an NVIDIA GPU; this PyTorch is built for AMD"
    if device.type != "cuda" or not torch.cuda.is_available():
        return (
            f"the kernels need an NVIDIA GPU, got device {device.type!r} (TRITON_INTERPRET=1 "
            "runs them on a CPU, in Triton's interpreter)"
        )
    capability = torch.cuda.get_device_capability(device.index)
    if capability < MIN_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, MIN_CAPABILITY))
        return f"the kernels need compute capability {least} or higher, got {found}"
    return ""
