"""One process of a run: checks, training, test."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from typing import Any, cast

import torch
from fvcore.common.config import CfgNode
from slowfast.utils.checkpoint import get_checkpoint_dir
from torch import nn

from slowfast_lara.config import check_machine
from slowfast_lara.config.load import with_overrides
from slowfast_lara.data.classes import names_in
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.epickitchens import annotations_folder
from slowfast_lara.data.loader import test_loader, train_loader, val_loader
from slowfast_lara.engine import resume_policy
from slowfast_lara.engine.distributed import (
    broadcast_from_rank0,
    rank,
    train_batch_per_rank,
    unwrap_ddp,
    world_size,
)
from slowfast_lara.engine.evaluate import TestedWeights, run_test
from slowfast_lara.engine.metrics import main_metric
from slowfast_lara.engine.run_logging import open_log, set_up_logging, write_records
from slowfast_lara.engine.signals import StopRequest, shield_workers
from slowfast_lara.engine.train import Trainer
from slowfast_lara.engine.train_state import TrainState
from slowfast_lara.errors import CheckpointError, ConfigError, DataError
from slowfast_lara.files import remove_unfinished
from slowfast_lara.labels import label_kind
from slowfast_lara.locks import exclusive_lock
from slowfast_lara.models import build_model
from slowfast_lara.models.build import device_of
from slowfast_lara.models.numerics import autocast_dtype, choose_gpu_arithmetic, choose_threads
from slowfast_lara.runs import checkpoint, saved_config
from slowfast_lara.user_code import imported

logger = logging.getLogger(__name__)


def run(cfg: CfgNode, stop: StopRequest) -> None:
    """Train and test according to the config; called once in each process."""
    check_machine(cfg)
    cfg = _resolve_precision(cfg)
    threads = choose_threads(cfg)
    choose_gpu_arithmetic(cfg)
    set_up_logging()
    # Read all lists and checkpoints before training, so that errors are reported at the start.
    loaders = _build_loaders(cfg)
    with contextlib.ExitStack() as stack:
        # Only rank 0 locks the folder, because only rank 0 reads and writes checkpoints.
        broadcast_from_rank0(
            lambda: stack.enter_context(exclusive_lock(cfg.OUTPUT_DIR, "OUTPUT_DIR", ConfigError))
        )
        state = tested = None
        if cfg.TRAIN.ENABLE:
            videos = cast(VideoDataset, loaders["train"].dataset)
            state = TrainState(cfg, resume_policy.list_fingerprint(videos.paths, videos.labels))
            # If the test uses another checkpoint, check it before training; load it after training.
            if cfg.TEST.CHECKPOINT_FILE_PATH and cfg.TEST.ENABLE:
                broadcast_from_rank0(lambda: _read_tested_weights(cfg) and None)
        elif cfg.TEST.ENABLE:
            tested = _build_tested_model(cfg)
        if rank() == 0:  # all checks have passed: write the first files
            open_log(cfg.OUTPUT_DIR)
            for folder in (cfg.OUTPUT_DIR, get_checkpoint_dir(cfg.OUTPUT_DIR)):
                remove_unfinished(folder)
            names = ", ".join(write_records(cfg))
            logger.info("Wrote config and versions to %s in %s", names, cfg.OUTPUT_DIR)
            logger.info("PyTorch threads: %s", threads)
            dtype = autocast_dtype(cfg, device_of(cfg))
            logger.info("Precision: %s", f"autocast to {dtype}" if dtype else "float32")
        if state:
            Trainer(state, loaders["train"], loaders["val"], stop).run()
            del state  # free the memory for the test
        if cfg.TEST.ENABLE:
            model, weights = tested or _build_tested_model(cfg)
            run_test(model, loaders["test"], cfg, weights, stop)
        if cfg.TRAIN.ENABLE and rank() == 0:
            _log_checkpoints(cfg.OUTPUT_DIR)


def _resolve_precision(cfg: CfgNode) -> CfgNode:
    """Replace SOLVER.PRECISION auto by the autocast dtype of this device.

    If the device has no such dtype, disable mixed precision. Checkpoints record the dtype, so a
    resume in another precision is detected.
    """
    if not cfg.SOLVER.USE_MIXED_PRECISION or cfg.SOLVER.PRECISION != "auto":
        return cfg
    dtype = autocast_dtype(cfg, device_of(cfg))
    if dtype is None:
        return with_overrides(cfg, ["SOLVER.USE_MIXED_PRECISION", False])
    return with_overrides(cfg, ["SOLVER.PRECISION", str(dtype).removeprefix("torch.")])


def _build_loaders(cfg: CfgNode) -> dict[str, Any]:
    ranks = {"rank": rank(), "world_size": world_size()}
    loaders = {}
    if cfg.TRAIN.ENABLE:
        batch_size = train_batch_per_rank(cfg)
        options: dict[str, Any] = {"batch_size": batch_size, **ranks}
        options["raw"] = device_of(cfg).type == "cuda"
        loaders["train"] = train_loader(cfg, **options)
        loaders["val"] = val_loader(cfg, **options)
    if cfg.TEST.ENABLE:
        loaders["test"] = test_loader(cfg, **ranks)
    for loader in loaders.values():
        shield_workers(loader)
    return loaders


def _build_tested_model(cfg: CfgNode) -> tuple[nn.Module, TestedWeights]:
    weights, states, attention = broadcast_from_rank0(lambda: _read_tested_weights(cfg))
    torch.manual_seed(cfg.RNG_SEED)
    model = build_model(cfg)
    checkpoint.load_weights(unwrap_ddp(model), states, weights.checkpoint, attention)
    return model, weights


def _read_tested_weights(
    cfg: CfgNode,
) -> tuple[TestedWeights, dict[str, torch.Tensor], checkpoint.TrainedAttention]:
    """Return the description, the tensors and the `TrainedAttention` of the tested weights."""
    given = cfg.TEST.CHECKPOINT_FILE_PATH
    found = (given, checkpoint.load(given)) if given else checkpoint.newest(cfg.OUTPUT_DIR)
    if found is None:
        raise CheckpointError(
            f"nothing to test: {cfg.OUTPUT_DIR}/checkpoints has no readable checkpoint, and "
            "TEST.CHECKPOINT_FILE_PATH is not set"
        )
    path, content = found
    attention = checkpoint.TrainedAttention.SAME
    # If this run trained, it has already compared the saved config with `cfg`.
    if given or not cfg.TRAIN.ENABLE:
        attention = saved_config.check_model(path, content, cfg, swap_attention=bool(given))
    states, averaged = checkpoint.weights_to_use(content, path, averaged=cfg.TEST.USE_EMA)
    return TestedWeights(path, averaged, _class_names(cfg, content)), states, attention


def _class_names(cfg: CfgNode, content: dict[str, Any]) -> list[str] | None:
    """Return the class names in the checkpoint, else in the folder of the lists, else None."""
    names, count = content.get("class_names"), label_kind(cfg).num_classes
    if type(names) is list and len(names) == count and {*map(type, names)} == {str}:
        return names
    with contextlib.suppress(DataError):  # not fatal: a test does not need the names
        return names_in(annotations_folder(cfg), count)
    return None


def _log_checkpoints(output_dir: str) -> None:
    """Log the checkpoints of a training run, and which of them `slowfast-lara predict` uses."""
    folder, used = get_checkpoint_dir(output_dir), "the last"
    names = [f"{os.path.basename(path)} (last)" for path in checkpoint.paths_in(output_dir)[-1:]]
    match checkpoint.peek_checkpoint(checkpoint.best_path(output_dir)):  # {} if best.pyth is absent
        case {"epoch": int(epoch), "val": dict(stats)}:
            used = checkpoint.BEST_NAME
            name, error = main_metric(stats)
            names.append(f"{used} (epoch {epoch + 1}, val {name} {100 - error:.1f} %)")
    logger.info("Checkpoints in %s: %s", folder, ", ".join(names))
    flags = "".join(f"--import {shlex.quote(name)} " for name in imported())
    logger.info("`slowfast-lara predict %s%s VIDEO` uses %s", flags, output_dir, used)
