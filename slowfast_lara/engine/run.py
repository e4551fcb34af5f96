"""One process of a run: check, then train, then test, as the config says."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from slowfast.utils.checkpoint import get_checkpoint_dir
from torch import nn
from torch.utils.data import DataLoader

from slowfast_lara.config import check_machine
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.loader import test_loader, train_loader, val_loader
from slowfast_lara.engine import resume_policy
from slowfast_lara.engine.distributed import (
    broadcast_from_rank0,
    per_process,
    rank,
    without_ddp,
    world_size,
)
from slowfast_lara.engine.evaluate import TestedWeights, run_test
from slowfast_lara.engine.run_logging import open_log, set_up_logging, write_records
from slowfast_lara.engine.signals import StopRequest, shield_workers
from slowfast_lara.engine.train import train
from slowfast_lara.engine.train_state import TrainState
from slowfast_lara.errors import CheckpointError, ConfigError
from slowfast_lara.files import remove_unfinished
from slowfast_lara.locks import exclusive_lock
from slowfast_lara.models import build_model
from slowfast_lara.models.numerics import choose_gpu_arithmetic, choose_threads
from slowfast_lara.runs import checkpoint, saved_config

logger = logging.getLogger(__name__)


def run(cfg: CfgNode, stop: StopRequest) -> None:
    """All of a run, in one of its processes."""
    check_machine(cfg)
    threads = choose_threads(cfg)
    choose_gpu_arithmetic(cfg)
    set_up_logging()
    # All lists are read before any training: their errors come first.
    loaders = _build_loaders(cfg)
    with contextlib.ExitStack() as stack:
        # Process 0 holds the folder for all: it alone reads and writes checkpoints.
        broadcast_from_rank0(
            lambda: _enter(stack, exclusive_lock(cfg.OUTPUT_DIR, "OUTPUT_DIR", ConfigError))
        )
        state = _train_state(cfg, loaders["train"]) if cfg.TRAIN.ENABLE else None
        if state and cfg.TEST.CHECKPOINT_FILE_PATH and cfg.TEST.ENABLE:
            broadcast_from_rank0(
                lambda: _weights_to_test(cfg) and None
            )  # its errors come first too
        tested = None if state or not cfg.TEST.ENABLE else _model_to_test(cfg)
        if rank() == 0:
            _begin_records(cfg, threads)
        if state:
            train(state, loaders["train"], loaders["val"], stop)
            state = None  # the test may need its memory
        if cfg.TEST.ENABLE:
            model, weights = tested or _model_to_test(cfg)
            run_test(model, loaders["test"], cfg, weights, stop)


def _enter(stack: contextlib.ExitStack, context: contextlib.AbstractContextManager[None]) -> None:
    stack.enter_context(context)


def _begin_records(cfg: CfgNode, threads: str) -> None:
    """The first that is written into the folder: all checks have passed."""
    open_log(cfg.OUTPUT_DIR)
    for folder in (cfg.OUTPUT_DIR, get_checkpoint_dir(cfg.OUTPUT_DIR)):
        remove_unfinished(folder)
    names = write_records(cfg)
    logger.info("Config and versions: %s in %s", ", ".join(names), cfg.OUTPUT_DIR)
    logger.info("Threads of PyTorch: %s", threads)


def _build_loaders(cfg: CfgNode) -> dict[str, Any]:
    place = {"rank": rank(), "world_size": world_size()}
    loaders = {}
    if cfg.TRAIN.ENABLE:
        batch_size = per_process(cfg, "TRAIN.BATCH_SIZE")
        loaders["train"] = train_loader(cfg, batch_size=batch_size, **place)
        loaders["val"] = val_loader(cfg, batch_size=batch_size, **place)
    if cfg.TEST.ENABLE:
        loaders["test"] = test_loader(cfg, **place)
    for loader in loaders.values():
        shield_workers(loader)
    return loaders


def _train_state(cfg: CfgNode, loader: DataLoader) -> TrainState:
    videos = cast(VideoDataset, loader.dataset)
    return TrainState(cfg, resume_policy.list_fingerprint(videos.paths, videos.labels))


def _model_to_test(cfg: CfgNode) -> tuple[nn.Module, TestedWeights]:
    """The model with its weights, and what these are."""
    weights, states, attention = broadcast_from_rank0(lambda: _weights_to_test(cfg))
    torch.manual_seed(cfg.RNG_SEED)
    model = build_model(cfg)
    checkpoint.load_weights(without_ddp(model), states, weights.checkpoint, attention)
    return model, weights


def _weights_to_test(
    cfg: CfgNode,
) -> tuple[TestedWeights, dict[str, torch.Tensor], checkpoint.TrainedAttention]:
    """Where they are from, the weights, and whether they are of another attention."""
    given = cfg.TEST.CHECKPOINT_FILE_PATH
    found = (given, checkpoint.load(given)) if given else checkpoint.newest(cfg.OUTPUT_DIR)
    if found is None:
        raise CheckpointError(
            f"there is nothing to test: no readable checkpoint in "
            f"{cfg.OUTPUT_DIR}/checkpoints, and no TEST.CHECKPOINT_FILE_PATH"
        )
    path, content = found
    attention = checkpoint.TrainedAttention.SAME
    if given or not cfg.TRAIN.ENABLE:  # a training has compared the folder's own
        attention = saved_config.check_model(path, content, cfg, swap_attention=bool(given))
    states, averaged = checkpoint.weights_to_use(content, path, averaged=cfg.TEST.USE_EMA)
    return TestedWeights(path, averaged), states, attention
