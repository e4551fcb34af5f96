"""Model, EMA, optimiser and loss scaler of a training run, and their checkpoints."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from fvcore.common.config import CfgNode

from slowfast_lara.config.keys import all_keys
from slowfast_lara.data.classes import names_in
from slowfast_lara.data.epickitchens import annotations_folder
from slowfast_lara.engine import resume_policy
from slowfast_lara.engine.checkpoint_writer import CheckpointWriter
from slowfast_lara.engine.distributed import (
    barrier,
    broadcast_from_rank0,
    rank,
    train_batch_per_rank,
    unwrap_ddp,
    world_size,
)
from slowfast_lara.engine.ema import ModelEMA
from slowfast_lara.engine.metrics import main_metric
from slowfast_lara.engine.optimizer import build_optimizer, load_optimizer, scales_loss
from slowfast_lara.errors import CheckpointError, ConfigError, DataError, WeightsError, first_line
from slowfast_lara.labels import label_kind
from slowfast_lara.models import MODEL_REGISTRY, build_model
from slowfast_lara.models.build import device_of
from slowfast_lara.models.weights.pretrained import image_weights, load_pretrained
from slowfast_lara.runs import checkpoint, saved_config
from slowfast_lara.runs.checkpoint import TrainingPosition

logger = logging.getLogger(__name__)


class TrainState:
    """All state that training changes; `start` is the position to train from.

    Random generators are not part of the state: `train` seeds them before every batch.
    `train_list` is the fingerprint of the training list (`resume_policy.list_fingerprint`).
    """

    def __init__(self, cfg: CfgNode, train_list: str) -> None:
        self.cfg, self.train_list = cfg, train_list
        self.class_names = _class_names(cfg)
        batch_size = train_batch_per_rank(cfg)
        if cfg.MIXUP.ENABLE and batch_size < 2:
            raise ConfigError(
                f"MIXUP.ENABLE is True, but the batch size per process is {batch_size}; must be at "
                "least 2: raise TRAIN.BATCH_SIZE"
            )
        self.global_batch = batch_size * world_size()
        found = broadcast_from_rank0(lambda: _find_start(cfg, train_list, self.global_batch))
        torch.manual_seed(cfg.RNG_SEED)
        self.model = build_model(cfg)
        bare_model = unwrap_ddp(self.model)
        self.optimizer = build_optimizer(bare_model, cfg)
        device = device_of(cfg)
        self.writer = CheckpointWriter(background=device.type == "cuda")
        self.scaler = torch.amp.GradScaler(device.type, enabled=scales_loss(cfg))
        decay = cfg.SOLVER.EMA_DECAY
        self.ema = ModelEMA(bare_model, decay) if decay else None
        self.start = TrainingPosition()
        if found:
            path, content, resume = found
            from_file = resume and path == cfg.TRAIN.CHECKPOINT_FILE_PATH
            advice = resume_policy.resume_from_file(path) if from_file else nullcontext()
            with advice:
                self.start = self._restore(path, content, resume)

    def save(self, position: TrainingPosition) -> str:
        """Write a checkpoint of the state at `position`; return the path of the file.

        Rank 0 writes. With CUDA, the file is complete only after `finish_writing`.
        """
        path = checkpoint.path_of(self.cfg.OUTPUT_DIR, position, self.global_batch)

        def write(content: dict[str, Any]) -> None:
            checkpoint.save(path, content)
            checkpoint.prune(path, self.cfg.TRAIN.CHECKPOINT_KEEP)
            logger.info("Saved %s", path)

        if rank() == 0:
            self.writer.submit(self._content(position), write)
        return path

    def finish_writing(self) -> None:
        """On all ranks, wait until rank 0 has written the last checkpoint."""
        self.writer.wait()
        barrier()

    def save_if_best(self, position: TrainingPosition, stats: dict[str, Any]) -> None:
        """Write best.pyth if the main error in `stats` is below that of the existing best.pyth.

        If best.pyth is missing or unreadable, write it, too.
        A model with non-finite scores for a video is never the best: its error excludes the video.
        """
        path = checkpoint.best_path(self.cfg.OUTPUT_DIR)
        if stats.get("num_not_finite"):
            logger.warning("best.pyth is unchanged: the model has scores that are not finite")
        elif rank() == 0:
            self.writer.wait()  # the background thread may be writing best.pyth
            if main_metric(stats)[1] < _best_error(path):
                content = {**self._content(position), "val": stats}
                self.writer.submit(content, partial(checkpoint.save, path))

    def _content(self, position: TrainingPosition) -> dict[str, Any]:
        ema = {}
        if self.ema is not None:
            ema = {checkpoint.EMA_STATE: self.ema.state_dict(), "ema_steps": self.ema.steps}
        return {
            # The index of the last completed epoch, as in PySlowFast.
            "epoch": position.epochs - 1,
            "iteration": position.batches,
            "global_batch": self.global_batch,
            "model_state": unwrap_ddp(self.model).state_dict(),
            **ema,
            "optimizer_state": self.optimizer.state_dict(),
            "scaler_state": self.scaler.state_dict(),
            "rng_seed": self.cfg.RNG_SEED,
            "train_list": self.train_list,
            # Config and class names make the checkpoint usable without any other file.
            "cfg": self.cfg.dump(),
            "class_names": self.class_names,
        }

    def _restore(self, path: str, content: dict[str, Any], resume: bool) -> TrainingPosition:
        self._load_weights(path, content)
        if not resume:
            return TrainingPosition()
        try:
            self._load_optimizer(path, content)
            scaler_state = content["scaler_state"] or self.scaler.state_dict()
            if not all(isinstance(value, (int, float)) for value in scaler_state.values()):
                raise TypeError("'scaler_state' has values that are not numbers")
            self.scaler.load_state_dict(scaler_state)
        # The checkpoint may be from an untrusted source; its optimiser state may be anything.
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot resume from checkpoint {path}: the state of its optimiser or loss scaler "
                f"does not fit ({first_line(error)})"
            ) from None
        position = checkpoint.position_of(path, content, self.global_batch)
        epochs, batches, max_epoch = position.epochs, position.batches, self.cfg.SOLVER.MAX_EPOCH
        if epochs >= max_epoch:
            limit = f"SOLVER.MAX_EPOCH {max_epoch}"
            logger.info(
                "Training is complete: %s is the checkpoint of epoch %d (%s)", path, epochs, limit
            )
        else:
            logger.info("Resuming from %s after %d epochs and %d batches", path, epochs, batches)
        # Resume at the start of a group of accumulated batches.
        return TrainingPosition(epochs, batches - batches % self.cfg.SOLVER.ACCUMULATE_STEPS)

    def _load_weights(self, path: str, content: dict[str, Any]) -> None:
        """Load weights and EMA; if the checkpoint has no EMA, the EMA starts from the weights."""
        model, ema_state = unwrap_ddp(self.model), content.get(checkpoint.EMA_STATE)
        if self.ema is not None and ema_state is not None:
            checkpoint.load_weights(model, ema_state, path)
            self.ema.reset(content.get("ema_steps", 0))
        checkpoint.load_weights(model, content["model_state"], path)
        if self.ema is not None and ema_state is None:
            self.ema.reset()

    def _load_optimizer(self, path: str, content: dict[str, Any]) -> None:
        method, layer_decay = self.cfg.SOLVER.OPTIMIZING_METHOD, self.cfg.SOLVER.LAYER_DECAY
        saved_method = saved_config.saved_value(content, "SOLVER.OPTIMIZING_METHOD")
        saved_decay = saved_config.saved_value(content, "SOLVER.LAYER_DECAY")
        if saved_method not in (None, method):
            reason = f"the optimiser was {saved_method}"
        elif (saved_decay in (None, 1)) != (layer_decay == 1):
            reason = "SOLVER.LAYER_DECAY changes the order of the parameters"
        else:
            load_optimizer(self.optimizer, content["optimizer_state"])
            return
        logger.warning(
            "Resetting the %s state: the state in %s does not fit: %s", method, path, reason
        )


def _class_names(cfg: CfgNode) -> list[str] | None:
    """Return the class names from the folder of the lists; None if they are missing or invalid."""
    try:
        return names_in(annotations_folder(cfg), label_kind(cfg).num_classes)
    except DataError as error:  # not fatal: training does not need the names
        logger.warning("Checkpoints will have no class names: %s", error)
        return None


def _find_start(
    cfg: CfgNode, train_list: str, global_batch: int
) -> tuple[str, dict[str, Any], bool] | None:
    """Return (path, content, whether to resume) of the initial weights; None for random weights."""
    if not cfg.TRAIN.AUTO_RESUME and checkpoint.paths_in(cfg.OUTPUT_DIR):
        # If the folder had checkpoints of two runs, the test could load one of the wrong run.
        raise ConfigError(
            f"TRAIN.AUTO_RESUME is False, but {cfg.OUTPUT_DIR} has checkpoints of another run; "
            "choose another OUTPUT_DIR"
        )
    path = cfg.TRAIN.CHECKPOINT_FILE_PATH
    if found := checkpoint.newest(cfg.OUTPUT_DIR):
        resume_policy.check_resume(*found, cfg, train_list)
        if path and saved_config.saved_value(found[1], "TRAIN.CHECKPOINT_FILE_PATH") != path:
            ignored = f"TRAIN.CHECKPOINT_FILE_PATH {path}"
            logger.warning("Ignoring %s: OUTPUT_DIR has checkpoints to resume from", ignored)
        return (*found, True)
    if path and not cfg.TRAIN.CHECKPOINT_EPOCH_RESET:
        with resume_policy.resume_from_file(path):
            content = checkpoint.load(path)
            position = checkpoint.position_of(path, content, global_batch)
            resume_policy.check_resume_from_file(path, content, position, cfg, train_list)
        return path, content, True
    if not path and cfg.VIT.IM_PRETRAINED:
        path = image_weights(cfg)
    elif not path and cfg.VIT.PRETRAINED_WEIGHTS != all_keys()["VIT.PRETRAINED_WEIGHTS"].default:
        ignored = f"VIT.PRETRAINED_WEIGHTS {cfg.VIT.PRETRAINED_WEIGHTS}"
        logger.warning("Ignoring %s: VIT.IM_PRETRAINED is False; True loads them", ignored)
    return (path, _adapted_weights(cfg, path), False) if path else None


def _adapted_weights(cfg: CfgNode, path: str) -> dict[str, Any]:
    """Return the weights of a file in any supported format, adapted to this model."""
    content = checkpoint.peek_checkpoint(path)
    resume_policy.check_start(path, content, cfg)
    if checkpoint.EMA_STATE in content:
        logger.info("Using the EMA weights of %s", path)
    torch.manual_seed(cfg.RNG_SEED)
    model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg)
    logger.info("%s", load_pretrained(model, path, inflate=cfg.VIT.INFLATE).table())
    return {"model_state": model.state_dict()}


def _best_error(path: str) -> float:
    """Return the main validation error in a checkpoint; infinity if it cannot be read."""
    try:
        return main_metric(checkpoint.load(path)["val"])[1]
    except (WeightsError, KeyError, TypeError, ValueError):
        return math.inf
