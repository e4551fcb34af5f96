"""What a checkpoint of a training holds: saving it, and starting from one."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

from slowfast_lara.data.classes import names_in
from slowfast_lara.engine import resume_policy
from slowfast_lara.engine.distributed import (
    broadcast_from_rank0,
    per_process,
    rank,
    without_ddp,
    world_size,
)
from slowfast_lara.engine.optimizer import build_optimizer, load_optimizer, scales_loss
from slowfast_lara.engine.weight_average import WeightAverage
from slowfast_lara.errors import CheckpointError, ConfigError, DataError, WeightsError, first_line
from slowfast_lara.models import MODEL_REGISTRY, build_model
from slowfast_lara.models.build import device_of
from slowfast_lara.models.weights.pretrained import image_weights, load_pretrained
from slowfast_lara.runs import checkpoint, saved_config
from slowfast_lara.runs.checkpoint import Position

logger = logging.getLogger(__name__)


class TrainState:
    """Model, its average, optimiser and loss scaler, at `start`: where training is to go on.

    There is no more to it: random states follow from the seed and the place in the run.
    `train_list` says which videos are trained on (`resume_policy.list_fingerprint`).
    """

    def __init__(self, cfg: CfgNode, train_list: str) -> None:
        self.cfg, self.train_list = cfg, train_list
        self.class_names = _class_names(cfg)
        batch_size = per_process(cfg, "TRAIN.BATCH_SIZE")
        if cfg.MIXUP.ENABLE and batch_size < 2:
            raise ConfigError("MIXUP.ENABLE is True; at least 2 clips for each process are needed")
        self.global_batch = batch_size * world_size()
        found = broadcast_from_rank0(lambda: _find_start(cfg, train_list))
        torch.manual_seed(cfg.RNG_SEED)
        self.model = build_model(cfg)
        self.optimizer = build_optimizer(without_ddp(self.model), cfg)
        self.scaler = torch.amp.GradScaler(device_of(cfg).type, enabled=scales_loss(cfg))
        decay = cfg.SOLVER.EMA_DECAY
        self.average = WeightAverage(without_ddp(self.model), decay) if decay else None
        self.start = self._restore(*found) if found else Position()

    def save(self, position: Position) -> str:
        """Write the checkpoint of a position; its path."""
        path = checkpoint.path_of(self.cfg.OUTPUT_DIR, position, self.global_batch)
        if rank() == 0:
            checkpoint.save(path, self._content(position))
            checkpoint.prune(path, self.cfg.TRAIN.CHECKPOINT_KEEP)
            logger.info("Saved %s", path)
        if world_size() > 1:  # nobody leaves while process 0 writes
            dist.barrier()
        return path

    def save_if_best(self, position: Position, stats: dict[str, Any]) -> None:
        """Write best.pyth if the validation error is lower than that of the one there."""
        path = checkpoint.best_path(self.cfg.OUTPUT_DIR)
        if rank() == 0 and stats["top1_err"] < _best_error(path):
            checkpoint.save(path, {**self._content(position), "val": stats})

    def _content(self, position: Position) -> dict[str, Any]:
        return {
            # The index of the last whole epoch, as in PySlowFast.
            "epoch": position.epochs - 1,
            "iteration": position.batches,
            "global_batch": self.global_batch,
            "model_state": without_ddp(self.model).state_dict(),
            **self._content_of_average(),
            "optimizer_state": self.optimizer.state_dict(),
            "scaler_state": self.scaler.state_dict(),
            "rng_seed": self.cfg.RNG_SEED,
            "train_list": self.train_list,
            # What a copied file needs to be used: the config has the normalisation too.
            "cfg": self.cfg.dump(),
            "class_names": self.class_names,
        }

    def _content_of_average(self) -> dict[str, Any]:
        if self.average is None:
            return {}
        return {checkpoint.EMA_STATE: self.average.state(), "ema_steps": self.average.steps}

    def _restore(self, path: str, content: dict[str, Any], go_on: bool) -> Position:
        self._load_weights(path, content)
        if not go_on:
            return Position()
        try:
            self._restore_optimizer(content)
            self._restore_scaler(content["scaler_state"] or self.scaler.state_dict())
        # The content may be anything: see `checkpoint.load`.
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be continued: its optimiser's state "
                f"does not fit ({first_line(error)})"
            ) from None
        position = checkpoint.position_of(path, content, self.global_batch)
        _log_continuing(path, position, self.cfg.SOLVER.MAX_EPOCH)
        # A step is never resumed half way.
        steps = self.cfg.SOLVER.ACCUMULATE_STEPS
        return Position(position.epochs, position.batches // steps * steps)

    def _load_weights(self, path: str, content: dict[str, Any]) -> None:
        """The weights, and their average, which starts from them where the checkpoint has none."""
        model, average = without_ddp(self.model), content.get(checkpoint.EMA_STATE)
        if self.average is not None and average is not None:
            checkpoint.load_weights(model, average, path)
            self.average.begin(content.get("ema_steps", 0))
        checkpoint.load_weights(model, content["model_state"], path)
        if self.average is not None and average is None:
            self.average.begin()

    def _restore_scaler(self, state: dict[str, Any]) -> None:
        if not all(isinstance(value, (int, float)) for value in state.values()):
            raise TypeError("numbers are expected as its scaler_state")
        self.scaler.load_state_dict(state)

    def _restore_optimizer(self, content: dict[str, Any]) -> None:
        before, method = (
            saved_config.saved_value(content, "SOLVER.OPTIMIZING_METHOD"),
            self.cfg.SOLVER.OPTIMIZING_METHOD,
        )
        decay = saved_config.saved_value(content, "SOLVER.LAYER_DECAY")
        if before not in (None, method):
            logger.warning("%s begins anew: what %s has gathered is not for it", method, before)
        elif (decay in (None, 1)) != (self.cfg.SOLVER.LAYER_DECAY == 1):
            logger.warning("%s begins anew: SOLVER.LAYER_DECAY orders parameters otherwise", method)
        else:
            load_optimizer(self.optimizer, content["optimizer_state"])


def _class_names(cfg: CfgNode) -> list[str] | None:
    """The names beside the lists; None where there are none that fit."""
    try:
        return names_in(cfg.DATA.PATH_TO_DATA_DIR, cfg.MODEL.NUM_CLASSES)
    except DataError as error:  # no reason to stop a training
        logger.warning("checkpoints will have no class names: %s", error)
        return None


def _log_continuing(path: str, position: Position, max_epoch: int) -> None:
    if position.epochs >= max_epoch:
        logger.info(
            "Training is finished: %d epochs are done (SOLVER.MAX_EPOCH %d) in %s",
            position.epochs,
            max_epoch,
            path,
        )
    else:
        logger.info(
            "Continuing %s: %d whole epochs and %d batches are done",
            path,
            position.epochs,
            position.batches,
        )


def _find_start(cfg: CfgNode, train_list: str) -> tuple[str, dict[str, Any], bool] | None:
    """The checkpoint to start from, and whether to go on from its epoch."""
    if not cfg.TRAIN.AUTO_RESUME and checkpoint.exist_in(cfg.OUTPUT_DIR):
        # They would be mixed with ours, and the newest of all tested.
        raise ConfigError(
            f"TRAIN.AUTO_RESUME is False; {cfg.OUTPUT_DIR} has checkpoints "
            "of another run, so another OUTPUT_DIR is expected"
        )
    found = checkpoint.newest(cfg.OUTPUT_DIR)
    path = cfg.TRAIN.CHECKPOINT_FILE_PATH
    if not found and path and not cfg.TRAIN.CHECKPOINT_EPOCH_RESET:
        found = path, checkpoint.load(path)
    if found:
        resume_policy.check_resume(*found, cfg, train_list)
        return (*found, True)
    if not path and cfg.VIT.IM_PRETRAINED:
        path = image_weights(cfg)
    return (path, _adapted_weights(cfg, path), False) if path else None


def _adapted_weights(cfg: CfgNode, path: str) -> dict[str, Any]:
    """The weights of a file of any known kind, made to fit this model."""
    content = checkpoint.peek_checkpoint(path)
    resume_policy.check_start(path, content, cfg)
    if checkpoint.EMA_STATE in content:
        logger.info("Of %s, the moving average of the weights", path)
    torch.manual_seed(cfg.RNG_SEED)
    model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg)
    logger.info("%s", load_pretrained(model, path, inflate=cfg.VIT.INFLATE).table())
    return {"model_state": model.state_dict()}


def _best_error(path: str) -> float:
    if not os.path.isfile(path):
        return math.inf
    try:
        return float(checkpoint.load(path)["val"]["top1_err"])
    except (WeightsError, KeyError, TypeError, ValueError):
        return math.inf
