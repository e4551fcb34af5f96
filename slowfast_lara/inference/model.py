"""A trained model from its files, for one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.config import load_config
from slowfast_lara.engine import checkpoint, experiment
from slowfast_lara.errors import ConfigError
from slowfast_lara.models import build_model


def read_config(path: str, overrides: Sequence[object]) -> CfgNode:
    """The config for one process, on the GPU if there is one."""
    gpus = min(1, torch.cuda.device_count())
    cfg = load_config(path, ["NUM_GPUS", gpus, "NUM_SHARDS", 1, "SHARD_ID", 0, *overrides])
    if cfg.NUM_GPUS > gpus:
        raise ConfigError(f"NUM_GPUS is {cfg.NUM_GPUS}; at most {gpus} is used here")
    return cfg


def load_model(cfg: CfgNode, weights: str) -> nn.Module:
    """The config's model with a checkpoint's weights, not to be trained.

    Another attention than it was trained with is allowed, and nothing else of the model.
    """
    content = checkpoint.load(weights)
    experiment.check_model(weights, content, cfg, swap_attention=True)
    model = build_model(cfg)
    checkpoint.load_weights(model, content["model_state"], weights)
    return model.eval().requires_grad_(False)
