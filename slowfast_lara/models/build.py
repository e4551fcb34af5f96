"""A model from a config, where it is to run."""

from __future__ import annotations

import torch
from fvcore.common.config import CfgNode
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slowfast_lara.models.registry import MODEL_REGISTRY


def build_model(cfg: CfgNode) -> nn.Module:
    """The config's model, on the process's GPU if NUM_GPUS > 0, in DDP if distributed."""
    model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg)
    if cfg.NUM_GPUS > 0:
        model.to(torch.device("cuda", torch.cuda.current_device()))
    if cfg.MODEL.COMPILE:
        model.compile()  # in place: parameter names stay
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        device_ids = [torch.cuda.current_device()] if cfg.NUM_GPUS > 0 else None
        model = DistributedDataParallel(model, device_ids=device_ids)
    return model
