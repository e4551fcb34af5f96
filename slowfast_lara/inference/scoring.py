"""Class scores of a video's views: the same code in tests and in a user's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from slowfast_lara.models.numerics import cpu_threads, gpu_arithmetic


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; non-blocking on CUDA only.

    On mps a non-blocking copy of a tensor that is freed meanwhile has wrong values
    (pytorch issue 189690).
    """
    return x.to(device, non_blocking=device.type == "cuda")


def autocast(cfg: CfgNode, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Mixed precision, if the config enables it."""
    if not cfg.SOLVER.USE_MIXED_PRECISION:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, cfg.SOLVER.PRECISION))


def views_at_a_time(cfg: CfgNode) -> int:
    """The share of TEST.BATCH_SIZE of one process."""
    return max(1, cfg.TEST.BATCH_SIZE // max(1, cfg.NUM_GPUS))


@torch.no_grad()
def view_outputs(
    model: nn.Module, views: Tensor, cfg: CfgNode, compute: Callable[..., Tensor] | None = None
) -> Tensor:
    """Outputs of the model, or of its method `compute`, for each view: float64, on the CPU.

    The bits do not depend on the process, so a test and a user get the same. On a CPU, mixed
    precision is off: without half-precision instructions it took 20 times as long.
    """
    weight = next(model.parameters())
    on_cpu = weight.device.type == "cpu"
    precision = contextlib.nullcontext() if on_cpu else autocast(cfg, weight.device)
    with precision, cpu_threads(cfg), gpu_arithmetic(cfg):
        outputs = [
            (compute or model)([part.to(weight.device, weight.dtype)])
            for part in views.split(views_at_a_time(cfg))
        ]
    return torch.cat(outputs).cpu().double()  # mps has no float64


def score_views(model: nn.Module, views: Tensor, cfg: CfgNode) -> Tensor:
    """Class scores of one video, float32 [classes]: the softmax averaged over its views.

    Views of different videos are never batched together, so scores do not depend on the number
    of processes.
    """
    return view_outputs(model, views, cfg).mean(dim=0).float()
