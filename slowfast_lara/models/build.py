"""Building a model from a config, on the device of the process."""

from __future__ import annotations

import torch
from fvcore.common.config import CfgNode
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slowfast_lara.attention import Estimator, has_kernels
from slowfast_lara.attention.kernels import choice
from slowfast_lara.models.attention_config import chosen_estimator
from slowfast_lara.models.registry import MODEL_REGISTRY


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the config's model on the process's device, wrapped in DDP if distributed."""
    device = device_of(cfg)
    model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg)
    if device.type != "cpu":  # not .to("cpu"): a model built on the meta device must stay there
        model = model.to(device)
    if device.type == "cuda":
        resolve_kernels(model, cfg, device)
    if cfg.MODEL.COMPILE:
        model.compile()  # in place, so that parameter names do not change
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        device_ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids)
    return model


def device_of(cfg: CfgNode) -> torch.device:
    """The device that this process computes on."""
    if cfg.NUM_GPUS > 0:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if cfg.DEVICE == "mps" else "cpu")


def resolve_kernels(model: nn.Module, cfg: CfgNode, device: torch.device) -> None:
    """If VIT.KERNELS is auto, choose the same kernels on all ranks, before the first step."""
    has_triton = cfg.VIT.ATTN_LAYER == "trajectory" or has_kernels(chosen_estimator(cfg))
    if cfg.VIT.KERNELS == "auto" and has_triton:
        mixed = cfg.SOLVER.USE_MIXED_PRECISION
        dtype = getattr(torch, cfg.SOLVER.PRECISION) if mixed else torch.float32
        sizes = (x.kernel_sizes for x in model.modules() if isinstance(x, Estimator))
        choice.resolve(device, dtype, next(sizes, None), all_ranks=True)
