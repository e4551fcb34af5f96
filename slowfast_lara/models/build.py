"""Building a model from a config, on the device of the process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from fvcore.common.config import CfgNode
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slowfast_lara.attention.kernels import choice
from slowfast_lara.attention.kernels.verdicts import Call
from slowfast_lara.models.motionformer import MODEL_REGISTRY
from slowfast_lara.models.numerics import autocast_dtype

logger = logging.getLogger(__name__)


def build_model(cfg: CfgNode) -> nn.Module:
    """Build the config's model on the process's device, wrapped in DDP if distributed."""
    device = device_of(cfg)
    model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg)
    if device.type != "cpu":  # not .to("cpu"): a model built on the meta device must stay there
        model = model.to(device)
    if device.type == "cuda":
        choose_kernels(cfg, device)
    if cfg.MODEL.COMPILE:
        # In place, so that parameter names do not change. Under DDP, PyTorch splits the graph at
        # the buckets, so that the all-reduce still overlaps with the backward pass.
        model.compile()
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        device_ids = [device] if device.type == "cuda" else None
        # forward_sync_buffers is False, because buffers are constant and equal on all ranks.
        # All trainable parameters are used, so that find_unused_parameters can stay False. Then
        # static_graph gains nothing.
        model = DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True, forward_sync_buffers=False
        )
    return model


def device_of(cfg: CfgNode) -> torch.device:
    """The device that this process computes on."""
    if cfg.NUM_GPUS > 0:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if cfg.DEVICE == "mps" else "cpu")


def choose_kernels(cfg: CfgNode, device: torch.device) -> None:
    """If VIT.KERNELS is auto, choose the same kernels on all ranks before the first step."""
    logger.info("Exact attention on %s uses flash or memory-efficient kernels, not cuDNN", device)
    if cfg.VIT.KERNELS != "auto":
        return
    dtype = autocast_dtype(cfg, device)
    if dtype is None:
        logger.info("Using PyTorch kernels on %s: the precision is float32", device)
        return
    calls = calls_of(cfg, ["TRAIN", "TEST"] if cfg.TRAIN.ENABLE else ["TEST"], dtype)
    if calls:
        choice.decide(calls, device, all_ranks=True)


def calls_of(cfg: CfgNode, parts: Sequence[str], dtype: torch.dtype) -> list[Call]:
    """Record the operators with Triton kernels, and their shapes, in one forward pass per part.

    Each of `parts` is TRAIN or TEST: its batch and crop size are used.
    """
    frames = (cfg.DATA.NUM_FRAMES,) if cfg.VIT.VIDEO_INPUT else ()
    with choice.recorded_calls() as calls, torch.device("meta"), torch.no_grad():
        model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg).to(dtype)
        for part in parts:
            batch = max(1, cfg[part].BATCH_SIZE // cfg.NUM_GPUS)
            crop = cfg.DATA[f"{part}_CROP_SIZE"]
            model([torch.empty(batch, cfg.VIT.CHANNELS, *frames, crop, crop, dtype=dtype)])
    return calls
