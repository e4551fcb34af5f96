"""Training: from a config, or from the newest checkpoint, to the last epoch.

Before every batch the random generators are seeded from (RNG_SEED, rank, epoch,
batch). So dropped paths and the noise of an estimator depend on nothing but the
place in the run, and a run that was interrupted continues bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode
from slowfast.utils.checkpoint import is_checkpoint_epoch
from torch.nn import functional
from torch.utils.data import DataLoader

from slowfast_lara.data.bad_videos import BadVideos
from slowfast_lara.engine import checkpoint
from slowfast_lara.engine.checkpoint import Position
from slowfast_lara.engine.distributed import (
    from_first,
    gather,
    per_process,
    rank,
    sum_over_processes,
    without_ddp,
    world_size,
)
from slowfast_lara.engine.evaluate import autocast, count_correct, device_of, validate
from slowfast_lara.engine.optimizer import build_optimizer, lr_at, lr_scale, set_lr
from slowfast_lara.engine.progress import TrainProgress
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import CheckpointError, ConfigError, RunError, Stopped
from slowfast_lara.models import MODEL_REGISTRY, build_model
from slowfast_lara.models.weights.pretrained import load_pretrained

logger = logging.getLogger(__name__)


def train(
    cfg: CfgNode, train_loader: DataLoader, val_loader: DataLoader, stop: StopRequest
) -> None:
    """Train to SOLVER.MAX_EPOCH, or until a signal stops it."""
    trainer = Trainer(cfg, train_loader, val_loader, stop)
    try:
        trainer.run()
    finally:
        trainer.progress.close()


class Trainer:
    """A model in training, and all that a checkpoint of it holds."""

    def __init__(
        self, cfg: CfgNode, train_loader: DataLoader, val_loader: DataLoader, stop: StopRequest
    ) -> None:
        self.cfg, self.stop = cfg, stop
        self.train_loader, self.val_loader = train_loader, val_loader
        self.global_batch = per_process(cfg, "TRAIN.BATCH_SIZE") * world_size()
        self.step_batch = self.global_batch * cfg.SOLVER.ACCUMULATE_STEPS
        start = from_first(self._find_start)
        torch.manual_seed(cfg.RNG_SEED)
        self.model = build_model(cfg)
        self.optimizer = build_optimizer(without_ddp(self.model), cfg)
        scaled = cfg.SOLVER.USE_MIXED_PRECISION and cfg.SOLVER.PRECISION == "float16"
        self.scaler = torch.amp.GradScaler(device_of(cfg).type, enabled=scaled)
        self.start = self._restore(*start) if start else Position()
        self.progress = TrainProgress(cfg, len(train_loader))
        self.bad_videos = BadVideos(len(train_loader.dataset), cfg.DATA.MAX_BAD_SHARE)
        # Signals and failures of any process, agreed on by all of them.
        self.stopping = False
        self.last_indices: list[int] = []

    def run(self) -> None:
        self._log_start()
        self.progress.show_clips(self.val_loader.dataset)
        epochs = self.cfg.SOLVER.MAX_EPOCH
        if self.cfg.TRAIN.CHECKPOINT_BEST and self.start.epochs and not self.start.batches:
            # The run may have ended between the checkpoint and this.
            self._validate(self.start.epochs - 1)
        self.model.train()
        for epoch in range(self.start.epochs, epochs):
            first_batch = self.start.batches if epoch == self.start.epochs else 0
            self._train_epoch(epoch, first_batch)
            last = epoch + 1 == epochs
            if last or is_checkpoint_epoch(epoch, self.cfg.TRAIN.CHECKPOINT_PERIOD):
                self._save(Position(epoch + 1))
            self._validate(epoch)

    # One epoch

    def _train_epoch(self, epoch: int, first_batch: int) -> None:
        total, steps = len(self.train_loader), self.cfg.SOLVER.ACCUMULATE_STEPS
        self.train_loader.batch_sampler.set_epoch(epoch, first_batch)
        self.progress.start_epoch(epoch, first_batch)
        self.optimizer.zero_grad(set_to_none=True)
        for i, batch in enumerate(self.progress.timed(self.train_loader), first_batch):
            if i % steps == 0:
                lr = lr_at(self.cfg, epoch + i / total) * lr_scale(self.cfg, self.step_batch)
                set_lr(self.optimizer, lr)
            # An epoch's last step may have fewer batches than the others.
            group = min(steps, total - i // steps * steps)
            steps_now = (i + 1) % steps == 0 or i + 1 == total
            self._train_batch(batch, epoch, i, lr, group, steps_now)
            if steps_now:
                self._step(epoch, i, lr)
                self._save_within(epoch, i + 1, group)
        self.progress.end_epoch()

    def _train_batch(
        self, batch: Any, epoch: int, i: int, lr: float, group: int, steps_now: bool
    ) -> None:
        torch.manual_seed(_seed(self.cfg.RNG_SEED, rank(), epoch, i))
        device = device_of(self.cfg)
        clips = [clip.to(device, non_blocking=True) for clip in batch.clips]
        labels = batch.labels.to(device, non_blocking=True)
        alone = world_size() == 1 or steps_now
        with contextlib.nullcontext() if alone else self.model.no_sync():
            with autocast(self.cfg):
                logits = self.model(clips)
            loss = functional.cross_entropy(
                logits.float(), labels, label_smoothing=self.cfg.SOLVER.SMOOTHING
            )
            # Before the backward pass: all processes go into it, or none.
            self._exchange(batch, logits.detach(), loss.item(), epoch, i, lr)
            self.scaler.scale(loss / group).backward()

    def _exchange(
        self, batch: Any, logits: torch.Tensor, loss: float, epoch: int, i: int, lr: float
    ) -> None:
        """Tell all processes of this one's batch, and hear of theirs."""
        finite = math.isfinite(loss)
        top1, top5 = count_correct(logits.float().cpu(), batch.labels)
        total = sum_over_processes(
            [
                loss if finite else 0.0,
                top1,
                top5,
                len(batch.labels),
                float(not finite),
                len(batch.failures),
                float(self.stop.requested),
            ]
        )
        loss_sum, top1, top5, count, not_finite, failures, stop = total
        if not_finite:
            self._fail_not_finite("loss", batch.indices.tolist(), loss, epoch, i, lr)
        if failures:
            for share in gather(list(batch.failures)):
                self.bad_videos.add(share)
        self.stopping = self.stopping or stop > 0
        self.last_indices = batch.indices.tolist()
        self.progress.update(
            loss=loss_sum / world_size(),
            top1_err=100 - 100 * top1 / count,
            top5_err=100 - 100 * top5 / count,
            lr=lr,
        )

    def _step(self, epoch: int, i: int, lr: float) -> None:
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.cfg.SOLVER.CLIP_GRAD or math.inf
        ).item()
        # The scaler itself leaves out a step whose float16 gradients overflow.
        if not math.isfinite(norm) and not self.scaler.is_enabled():
            self._fail_not_finite("gradient", self.last_indices, norm, epoch, i, lr)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _fail_not_finite(
        self, what: str, indices: list[int], value: float, epoch: int, i: int, lr: float
    ) -> None:
        paths = [self.train_loader.dataset.paths[index] for index in indices]
        shares = gather((value, paths))
        told = "; ".join(
            f"{value} in process {r}, batch of {', '.join(paths)}"
            for r, (value, paths) in enumerate(shares)
            if not math.isfinite(value)
        )
        raise RunError(
            f"the {what} is not finite at epoch {epoch + 1}, iteration {i + 1} of "
            f"{len(self.train_loader)}, learning rate {lr:g}: {told}. "
            f"The last checkpoint is as it was."
        )

    def _validate(self, epoch: int) -> None:
        last = epoch + 1 == self.cfg.SOLVER.MAX_EPOCH
        if not last and (epoch + 1) % self.cfg.TRAIN.EVAL_PERIOD:
            return
        stats = validate(self.model, self.val_loader, self.cfg, self.stop)
        if stats is None:
            self._stop_at(Position(epoch + 1))
        self.progress.validated(epoch, stats)
        if rank() == 0 and self.cfg.TRAIN.CHECKPOINT_BEST:
            path = checkpoint.best_path(self.cfg.OUTPUT_DIR)
            if stats["top1_err"] < _best_error(path):
                checkpoint.save(path, {**self._content(Position(epoch + 1)), "val": stats})

    # Checkpoints

    def _save_within(self, epoch: int, batches: int, group: int) -> None:
        at_end = batches == len(self.train_loader)
        position = Position(epoch + 1) if at_end else Position(epoch, batches)
        if self.stopping:
            self._stop_at(position)
        every = self.cfg.TRAIN.CHECKPOINT_ITERATIONS
        if every and not at_end and batches // every > (batches - group) // every:
            self._save(position)

    def _stop_at(self, position: Position) -> None:
        path = self._save(position)
        name = self.stop.signal_name or "a signal to another process"
        raise Stopped(f"stopped by {name}; saved {path}; the same command continues from there")

    def _save(self, position: Position) -> str:
        output_dir = self.cfg.OUTPUT_DIR
        path = checkpoint.path_of(output_dir, position)
        if rank() == 0:
            checkpoint.save(path, self._content(position))
            checkpoint.prune(output_dir, self.cfg.TRAIN.CHECKPOINT_KEEP)
            logger.info("Saved %s", path)
        if world_size() > 1:  # nobody leaves while process 0 writes
            dist.barrier()
        return path

    def _content(self, position: Position) -> dict[str, Any]:
        return {
            # The index of the last whole epoch, as in PySlowFast.
            "epoch": position.epochs - 1,
            "iteration": position.batches,
            "global_batch": self.global_batch,
            "model_state": without_ddp(self.model).state_dict(),
            "optimizer_state": self.optimizer.state_dict(),
            "scaler_state": self.scaler.state_dict(),
            # All there is to the random states: see the head of this file.
            "rng_seed": self.cfg.RNG_SEED,
            "cfg": self.cfg.dump(),
        }

    def _find_start(self) -> tuple[str, dict[str, Any], bool] | None:
        """The checkpoint to start from, and whether to go on from its epoch."""
        train_cfg = self.cfg.TRAIN
        if not train_cfg.AUTO_RESUME and checkpoint.exist_in(self.cfg.OUTPUT_DIR):
            # They would be mixed with ours, and the newest of all tested.
            raise ConfigError(
                f"TRAIN.AUTO_RESUME is False; {self.cfg.OUTPUT_DIR} has checkpoints "
                "of another run, so another OUTPUT_DIR is expected"
            )
        found = checkpoint.newest(self.cfg.OUTPUT_DIR)
        if found:
            return (*found, True)
        path, vit = train_cfg.CHECKPOINT_FILE_PATH, self.cfg.VIT
        if path and not train_cfg.CHECKPOINT_EPOCH_RESET:
            return path, checkpoint.load(path), True
        if not path and vit.IM_PRETRAINED:
            path = vit.PRETRAINED_WEIGHTS
            if not os.path.isfile(path):
                raise ConfigError(
                    f"VIT.PRETRAINED_WEIGHTS is {path!r}; an existing file is expected (see "
                    "configs/README.md), or VIT.IM_PRETRAINED False to start from random weights"
                )
        return (path, self._adapted_weights(path), False) if path else None

    def _adapted_weights(self, path: str) -> dict[str, Any]:
        """The weights of a file of any known kind, made to fit this model."""
        torch.manual_seed(self.cfg.RNG_SEED)
        model = MODEL_REGISTRY.get(self.cfg.MODEL.MODEL_NAME).from_config(self.cfg)
        logger.info("%s", load_pretrained(model, path, inflate=self.cfg.VIT.INFLATE).table())
        return {"model_state": model.state_dict()}

    def _restore(self, path: str, content: dict[str, Any], go_on: bool) -> Position:
        checkpoint.load_weights(without_ddp(self.model), content["model_state"], path)
        if not go_on:
            return Position()
        try:
            self.optimizer.load_state_dict(content["optimizer_state"])
            self.scaler.load_state_dict(content["scaler_state"] or self.scaler.state_dict())
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be continued: its optimiser's state "
                f"does not fit ({error})"
            ) from None
        position = checkpoint.position_of(content, self.global_batch)
        logger.info(
            "Continuing %s: %d whole epochs and %d batches are done",
            path,
            position.epochs,
            position.batches,
        )
        # A step is never resumed half way.
        steps = self.cfg.SOLVER.ACCUMULATE_STEPS
        return Position(position.epochs, position.batches // steps * steps)

    def _log_start(self) -> None:
        cfg, accumulate = self.cfg, self.cfg.SOLVER.ACCUMULATE_STEPS
        parameters = sum(p.numel() for p in self.model.parameters())
        scale = lr_scale(cfg, self.step_batch)
        logger.info(
            "%s with %s attention: %.2f million parameters",
            cfg.MODEL.MODEL_NAME,
            cfg.VIT.APPROX_ATTN_TYPE,
            parameters / 1e6,
        )
        logger.info(
            "Effective batch %d: TRAIN.BATCH_SIZE %d per node * %d nodes * %d accumulated; "
            "%d processes, %d batches an epoch",
            self.step_batch,
            cfg.TRAIN.BATCH_SIZE,
            cfg.NUM_SHARDS,
            accumulate,
            world_size(),
            len(self.train_loader),
        )
        logger.info(
            "Learning rate %g: SOLVER.BASE_LR %g * %g (SOLVER.REFERENCE_BATCH %d), %s, %s",
            cfg.SOLVER.BASE_LR * scale,
            cfg.SOLVER.BASE_LR,
            scale,
            cfg.SOLVER.REFERENCE_BATCH,
            cfg.SOLVER.OPTIMIZING_METHOD,
            cfg.SOLVER.LR_POLICY,
        )


def _seed(*place: int) -> int:
    """One seed for each place in a run, without the patterns of a sum."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


def _best_error(path: str) -> float:
    if not os.path.isfile(path):
        return math.inf
    try:
        return checkpoint.load(path)["val"]["top1_err"]
    except (CheckpointError, KeyError):
        return math.inf
