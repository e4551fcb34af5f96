"""Scores of a model for the views of a video, the same in a test and in a user's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from slowfast_lara.models.numerics import cpu_threads, gpu_arithmetic


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to a device.

    Only for CUDA does the host not wait for the copy: on its way to mps, a tensor that is freed
    meanwhile arrives as something else (pytorch issue 189690).
    """
    return x.to(device, non_blocking=device.type == "cuda")


def autocast(cfg: CfgNode, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Mixed precision, if the config has it."""
    if not cfg.SOLVER.USE_MIXED_PRECISION:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, cfg.SOLVER.PRECISION))


def views_at_a_time(cfg: CfgNode) -> int:
    """A process's share of TEST.BATCH_SIZE."""
    return max(1, cfg.TEST.BATCH_SIZE // max(1, cfg.NUM_GPUS))


@torch.no_grad()
def view_outputs(
    model: nn.Module, views: Tensor, cfg: CfgNode, compute: Callable[..., Tensor] | None = None
) -> Tensor:
    """Scores of views, float64 [views, classes] on the CPU, or what another method computes.

    They are the same to the last bit in a test and in a user's process. On a CPU they are in
    float32, whatever the config says: without instructions for them, products in half precision
    took 20 times as long.
    """
    weight = next(model.parameters())
    on_cpu = weight.device.type == "cpu"
    precision = contextlib.nullcontext() if on_cpu else autocast(cfg, weight.device)
    with precision, cpu_threads(cfg), gpu_arithmetic(cfg):
        outputs = [
            (compute or model)([part.to(weight.device, weight.dtype)])
            for part in views.split(views_at_a_time(cfg))
        ]
    # On the host, because mps knows no float64.
    return torch.cat(outputs).cpu().double()


def score_views(model: nn.Module, views: Tensor, cfg: CfgNode) -> Tensor:
    """A video's class scores, float32 [classes]: the mean softmax of its views.

    Each video goes through the model by itself: scores do not depend on the number of
    processes.
    """
    return view_outputs(model, views, cfg).mean(dim=0).float()
