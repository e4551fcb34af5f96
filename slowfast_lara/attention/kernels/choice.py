"""Choice between PyTorch's operations and the Triton kernels.

The option `kernels` is `torch`, `triton` or `auto`. `triton` raises an error where the Triton
kernels cannot run. `auto` selects Triton on an NVIDIA GPU if its results agree with PyTorch's on
this GPU (self_check.py), and PyTorch everywhere else. `resolve` makes the decision for `auto` once
per device and dtype: when build_model moves a model to a GPU, or else at the first forward pass.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor

from slowfast_lara.attention.kernels.launch import interpreted
from slowfast_lara.attention.kernels.self_check import first_difference
from slowfast_lara.attention.tensors import is_exporting

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "torch", "triton"]
KERNELS = get_args(Kernels)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128
MAX_SAMPLES = 256
MIN_CAPABILITY = (8, 0)

# Whether `auto` means Triton, by device and dtype.
DECISIONS: dict[tuple[torch.device, torch.dtype], bool] = {}


def unsupported_sizes(head_dim: int, num_samples: int) -> str:
    """Description of the size that LARA's and Performer's kernels do not support, or ""."""
    if head_dim > MAX_HEAD_DIM:
        return f"a head size above {MAX_HEAD_DIM} ({head_dim})"
    if num_samples > MAX_SAMPLES:
        return f"more than {MAX_SAMPLES} landmarks or samples ({num_samples})"
    return ""


def uses_triton(kernels: str, x: Tensor, unsupported: str = "") -> bool:
    """Whether to use Triton for tensors like x; `unsupported` describes a size without a kernel."""
    if kernels == "torch" or is_exporting():
        return False
    if x.dtype not in DTYPES:
        unsupported = unsupported or str(x.dtype).removeprefix("torch.")
    if kernels == "auto":
        return not unsupported and x.device.type == "cuda" and resolved(x)
    if unsupported:
        raise ValueError(f"kernels='triton' does not support {unsupported}; use 'auto' or 'torch'")
    # No check for the meta device, for fake tensors or while torch.compile traces: no kernel runs.
    if not (torch.compiler.is_compiling() or x.device.type == "meta" or isinstance(x, FakeTensor)):
        problem = obstacle(x.device)
        if interpreted() and x.dtype == torch.bfloat16:
            problem = problem or "Triton's interpreter computes wrong bfloat16 matmuls"
        if problem:
            raise ValueError(f"kernels='triton' cannot run: {problem}; use 'auto' or 'torch'")
    return True


def resolved(x: Tensor) -> bool:
    """Decision of `resolve` for x's device and dtype; call `resolve` if there is none yet."""
    if torch.compiler.is_compiling():  # the self-check cannot run while torch.compile traces
        return DECISIONS.get((x.device, x.dtype), False)
    if isinstance(x, FakeTensor):
        return not obstacle(x.device)
    if (x.device, x.dtype) not in DECISIONS:
        resolve(x.device, x.dtype)
    return DECISIONS[x.device, x.dtype]


def resolve(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int] | None = None,
    *,
    all_ranks: bool = False,
) -> bool:
    """Decide whether `auto` means Triton on a device with a dtype; log the decision and its reason.

    Args:
        sizes: head size and number of samples of the model. The self-check also runs with these
            sizes, because large sizes exceed the shared memory of some GPUs.
        all_ranks: reduce the decision over the process group, so that all ranks run the same
            kernels. All ranks must then call this function.
    """
    reason, level = obstacle(device), logging.INFO
    if not reason:
        if sizes is not None and unsupported_sizes(*sizes):
            sizes = None
        reason, level = first_difference(device, dtype, sizes), logging.WARNING
    triton = not reason
    if all_ranks and distributed.is_initialized() and distributed.get_world_size() > 1:
        on = device if distributed.get_backend() == "nccl" else torch.device("cpu")
        votes = torch.tensor(int(triton), device=on)
        distributed.all_reduce(votes, distributed.ReduceOp.MIN)
        if triton and not votes.item():
            triton, reason, level = False, "another rank cannot use Triton", logging.INFO
    if triton:
        reason, level = "results agree with PyTorch's", logging.INFO
    library, name = "Triton" if triton else "PyTorch", str(dtype).removeprefix("torch.")
    logger.log(level, "Using %s kernels on %s (%s): %s", library, device, name, reason)
    DECISIONS[device, dtype] = triton
    return triton


def obstacle(device: torch.device) -> str:
    """Reason why Triton kernels cannot run on a device, or an empty string."""
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
