"""Class scores of the views of a video. Tests and `slowfast_lara.load` share this code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from slowfast_lara.models.numerics import autocast_dtype, cpu_threads, gpu_arithmetic


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; the copy is non-blocking on CUDA only.

    On mps, a non-blocking copy has wrong values if the source tensor is freed before the copy
    ends (pytorch issue 189690).
    """
    return x.to(device, non_blocking=device.type == "cuda")


def autocast(cfg: CfgNode, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Autocast context, or a null context if the model computes in float32 on this device."""
    dtype = autocast_dtype(cfg, device)
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()


def views_at_a_time(cfg: CfgNode) -> int:
    """The number of views per forward pass in one process: TEST.BATCH_SIZE / NUM_GPUS."""
    return max(1, cfg.TEST.BATCH_SIZE // max(1, cfg.NUM_GPUS))


@torch.no_grad()
def view_outputs(
    model: nn.Module, views: Tensor, cfg: CfgNode, compute: Callable[..., Tensor] | None = None
) -> Tensor:
    """Compute the output of `compute` (default: of the model) for each view: float64, on the CPU.

    Outputs are bitwise the same in a test and after `slowfast_lara.load`. Mixed precision is not
    used on a CPU: on a CPU without half-precision instructions, autocast took 20 times as long as
    float32.
    """
    weight = next(model.parameters())
    on_cpu = weight.device.type == "cpu"
    precision = contextlib.nullcontext() if on_cpu else autocast(cfg, weight.device)
    with precision, cpu_threads(cfg), gpu_arithmetic(cfg):
        outputs = [
            (compute or model)([part.to(weight.device, weight.dtype)])
            for part in views.split(views_at_a_time(cfg))
        ]
    return torch.cat(outputs).cpu().double()  # convert on the CPU: mps has no float64


def mean_of_views(outputs: Tensor, cfg: CfgNode) -> Tensor:
    return outputs.mean(dim=0).float()


def pool_scores(outputs: Tensor, cfg: CfgNode) -> Tensor:
    """Combine the scores of a video's views: maximum if DATA.ENSEMBLE_METHOD is max, else mean."""
    if cfg.DATA.ENSEMBLE_METHOD == "max":
        return outputs.amax(dim=0).float()
    return mean_of_views(outputs, cfg)


def score_views(model: nn.Module, views: Tensor, cfg: CfgNode) -> Tensor:
    """Class scores of one video, float32 [classes]: the scores of its views, averaged by default.

    A batch never has views of two videos, so the scores do not depend on how videos are
    distributed over processes.
    """
    return pool_scores(view_outputs(model, views, cfg), cfg)
