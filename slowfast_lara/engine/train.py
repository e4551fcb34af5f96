"""Training: from a config, or from the newest checkpoint, to the last epoch.

Before every batch the random generators are seeded from (RNG_SEED, rank, epoch,
batch). So dropped paths, the noise of an estimator and how a batch is mixed depend on
nothing but the place in the run, and a run that was interrupted continues bit for bit.

Nothing in an iteration waits for its own results. Its numbers are read in the next
one, between the forward and the backward pass (see `iteration`), by an exchange in
which all processes meet. For a backward pass adds up gradients over the processes: one
that came to it alone would wait for the others forever. What can keep one away:

- An exception, in its loader or its forward pass. It ends the process, which closes its
  connections: the others get an error in their exchange. Work for the device that was
  queued before is still done, because others may be adding up gradients with it.
- A signal. It is told in the exchange; all stop after the same optimiser step. If the
  next batch of one does not come, all stop at the step before it.
- Too many bad videos, or a number that is not finite. These too are told in the
  exchange, after which all processes raise the same error.
- Its death, or an exception in the backward pass itself: the connections of gloo break,
  NCCL's do not, and `heartbeat` then ends the others.

No optimiser steps on a number that is not finite: a loss that is not finite gives NaN
gradients, the sum over the processes makes them NaN everywhere, and the optimiser
leaves out, on the device, a step whose gradients are not finite. The error comes when
the numbers are read, and that is before any checkpoint of the iteration is written.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from slowfast.utils.checkpoint import is_checkpoint_epoch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from slowfast_lara.data.bad_videos import BadVideos, Failure
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.loader import Batch, TrainBatches
from slowfast_lara.engine.distributed import gather, rank, world_size
from slowfast_lara.engine.evaluate import count_correct, validate
from slowfast_lara.engine.iteration import (
    Iteration,
    Numbers,
    Outcome,
    check_finite,
    exchange,
    iteration_at,
    mean_numbers,
)
from slowfast_lara.engine.mixup import draw_mix, main_labels, mix_clips, mixed_loss
from slowfast_lara.engine.optimizer import lr_scale, set_lr, step_if_finite
from slowfast_lara.engine.progress import TrainProgress
from slowfast_lara.engine.shutdown import is_connection_loss
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.engine.train_state import TrainState
from slowfast_lara.errors import Stopped
from slowfast_lara.inference.scoring import autocast, to_device
from slowfast_lara.models.attention_config import display_name
from slowfast_lara.models.build import device_of
from slowfast_lara.runs.checkpoint import Position

logger = logging.getLogger(__name__)


def train(
    state: TrainState, train_loader: DataLoader, val_loader: DataLoader, stop: StopRequest
) -> None:
    """Train to SOLVER.MAX_EPOCH, or until a signal stops it."""
    trainer = Trainer(state, train_loader, val_loader, stop)
    try:
        trainer.run()
    except Exception as error:
        if torch.cuda.is_initialized() and not is_connection_loss(error):
            with contextlib.suppress(RuntimeError):  # what was queued has failed itself
                torch.cuda.synchronize()
        raise
    finally:
        trainer.progress.close()


class Trainer:
    """The loop over epochs and batches."""

    def __init__(
        self, state: TrainState, train_loader: DataLoader, val_loader: DataLoader, stop: StopRequest
    ) -> None:
        cfg = state.cfg
        self.cfg, self.state, self.stop = cfg, state, stop
        self.train_loader, self.val_loader = train_loader, val_loader
        self.dataset = cast(VideoDataset, train_loader.dataset)
        self.model, self.optimizer, self.scaler = state.model, state.optimizer, state.scaler
        self.step_batch = state.global_batch * cfg.SOLVER.ACCUMULATE_STEPS
        self.lr_scale = lr_scale(cfg, self.step_batch)
        self.progress = TrainProgress(cfg, len(train_loader))
        self.bad_videos = BadVideos(len(self.dataset), cfg.DATA.MAX_BAD_SHARE)
        # A signal to any process, agreed on by all of them.
        self.stopping = False
        # Where the weights are: at the start, or after the last optimiser step.
        self.position = self.state.start
        # The last iteration, until its numbers are exchanged.
        self.waiting: Outcome | None = None

    def run(self) -> None:
        self._log_start()
        self.progress.show_clips(cast(VideoDataset, self.val_loader.dataset))
        epochs, start = self.cfg.SOLVER.MAX_EPOCH, self.state.start
        if self.cfg.TRAIN.CHECKPOINT_BEST and start.epochs and not start.batches:
            # The run may have ended between the checkpoint and this.
            self._validate(start.epochs - 1)
        self.model.train()
        for epoch in range(start.epochs, epochs):
            self._train_epoch(epoch, start.batches if epoch == start.epochs else 0)
            last = epoch + 1 == epochs
            if last or is_checkpoint_epoch(epoch, self.cfg.TRAIN.CHECKPOINT_PERIOD):
                self._save(Position(epoch + 1))
            self._validate(epoch)

    # One epoch

    def _train_epoch(self, epoch: int, first_batch: int) -> None:
        total = len(self.train_loader)
        cast(TrainBatches, self.train_loader.batch_sampler).set_epoch(epoch, first_batch)
        self.progress.start_epoch(epoch, first_batch)
        self.optimizer.zero_grad(set_to_none=True)
        group_indices: list[int] = []
        batches = self.stop.batches(self.train_loader)
        for i, batch in enumerate(self.progress.timed(batches), first_batch):
            at = iteration_at(self.cfg, epoch, i, total, self.lr_scale)
            numbers = self._train_batch(batch, at)
            indices = batch.indices.tolist()
            group_indices = indices if i == at.group_start else group_indices + indices
            self.waiting = Outcome(at, numbers, indices, group_indices, *self.progress.lap())
            if at.ends_group:
                self.position = at.position_after
                self._save_within(at)
        if self.stop.stalled:  # in place of the exchange of the batch that did not come
            self._exchange()
        self._settle()
        self.progress.end_epoch()

    def _train_batch(self, batch: Batch, at: Iteration) -> Numbers:
        seed = _seed(self.cfg.RNG_SEED, rank(), at.epoch, at.batch)
        torch.manual_seed(seed)
        with self._gradients_for(at):
            loss, correct = self._forward(batch, seed)
            self._exchange(batch.failures)  # all processes go into the backward pass, or none
            self._backward(loss, at)
        norm = self._step(at) if at.ends_group else torch.zeros_like(loss)
        return Numbers([loss, *correct, norm])

    def _gradients_for(self, at: Iteration) -> contextlib.AbstractContextManager[None]:
        """DDP adds up gradients over the processes in the last backward pass of a group."""
        if isinstance(self.model, DistributedDataParallel) and not at.ends_group:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _forward(self, batch: Batch, seed: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss, and how many guesses are right, still on the device."""
        device = device_of(self.cfg)
        height, width = batch.clips[0].shape[-2:]
        mix = draw_mix(self.cfg.MIXUP, height, width, seed)
        clips = [mix_clips(to_device(clip, device), mix) for clip in batch.clips]
        labels = to_device(batch.labels, device)
        with autocast(self.cfg, device):
            logits = self.model(clips)
        logits = logits.float()
        loss = mixed_loss(logits, labels, mix, self.cfg.SOLVER.SMOOTHING)
        return loss, count_correct(logits.detach(), main_labels(labels, mix))

    def _backward(self, loss: Tensor, at: Iteration) -> None:
        # An infinite loss may have finite gradients. They are to be NaN, in all processes.
        factor = torch.where(loss.detach().isfinite(), 1.0, math.nan)
        self.scaler.scale(loss * factor / at.group_size).backward()

    def _step(self, at: Iteration) -> Tensor:
        """Step with the group's gradients; their norm."""
        set_lr(self.optimizer, at.lr)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.cfg.SOLVER.CLIP_GRAD or math.inf
        )
        if self.scaler.is_enabled():  # it leaves out a step whose float16 gradients overflow
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            step_if_finite(self.optimizer, norm)
        self.optimizer.zero_grad(set_to_none=True)
        if self.state.average is not None:
            self.state.average.update()
        return norm

    def _exchange(self, failures: Sequence[Failure] = ()) -> None:
        """Meet the other processes: report the iteration that waits, and agree on how to go on."""
        outcome, self.waiting = self.waiting, None
        totals = exchange(outcome, len(failures), self.stop.requested, self.stop.stalled)
        if outcome is not None:
            overflow = self.scaler.is_enabled()
            check_finite(outcome, totals, self.dataset.paths, gradients_may_overflow=overflow)
            self.progress.update(outcome, mean_numbers(totals))
        if totals.failures:
            for share in gather(list(failures)):
                self.bad_videos.add(share)
        self.stopping = self.stopping or totals.stop > 0
        if totals.stalled:  # one process has no batch, so none goes on with its own
            raise self._stopped_at(self.position)

    def _settle(self) -> None:
        """Check and report the last iteration, if that is still to do."""
        if self.waiting is not None:
            self._exchange()

    def _validate(self, epoch: int) -> None:
        last = epoch + 1 == self.cfg.SOLVER.MAX_EPOCH
        if not last and (epoch + 1) % self.cfg.TRAIN.EVAL_PERIOD:
            return
        stats = self._validated_weights()
        if stats is None:
            raise self._stopped_at(Position(epoch + 1))
        self.progress.validated(epoch, stats)
        if self.cfg.TRAIN.CHECKPOINT_BEST:
            self.state.save_if_best(Position(epoch + 1), stats)

    def _validated_weights(self) -> dict[str, Any] | None:
        """Errors of the weights, or, where there is one, of their average and then of them."""
        check = partial(validate, self.model, self.val_loader, self.cfg, self.stop)
        stats = check()
        if stats is None or self.state.average is None:
            return stats
        with self.state.average.in_place():
            averaged = check()
        raw = {f"raw_{name}": stats[name] for name in ("top1_err", "top5_err")}
        return None if averaged is None else {**averaged, **raw}

    # Checkpoints

    def _save_within(self, at: Iteration) -> None:
        """Save after an optimiser step, if a signal or TRAIN.CHECKPOINT_ITERATIONS asks for it."""
        if self.stopping:
            raise self._stopped_at(at.position_after)
        every = self.cfg.TRAIN.CHECKPOINT_ITERATIONS
        if every and not at.ends_epoch and (at.batch + 1) // every > at.group_start // every:
            self._save(at.position_after)

    def _stopped_at(self, position: Position) -> Stopped:
        path = self._save(position)
        name = self.stop.signal_name or "a signal to another process"
        return Stopped(f"stopped by {name}; saved {path}; the same command continues from there")

    def _save(self, position: Position) -> str:
        self._settle()  # a checkpoint holds nothing that was not checked and logged
        return self.state.save(position)

    def _log_start(self) -> None:
        cfg, accumulate = self.cfg, self.cfg.SOLVER.ACCUMULATE_STEPS
        parameters = sum(p.numel() for p in self.model.parameters())
        logger.info(
            "%s with %s attention: %.2f million parameters",
            cfg.MODEL.MODEL_NAME,
            display_name(cfg.VIT.APPROX_ATTN_TYPE),
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
            cfg.SOLVER.BASE_LR * self.lr_scale,
            cfg.SOLVER.BASE_LR,
            self.lr_scale,
            cfg.SOLVER.REFERENCE_BATCH,
            cfg.SOLVER.OPTIMIZING_METHOD,
            cfg.SOLVER.LR_POLICY,
        )
        if cfg.SOLVER.LAYER_DECAY < 1:
            lowest = min(group["lr_scale"] for group in self.optimizer.param_groups)
            logger.info(
                "SOLVER.LAYER_DECAY %g: the embeddings learn at %g of this rate",
                cfg.SOLVER.LAYER_DECAY,
                lowest,
            )


def _seed(*place: int) -> int:
    """One seed for each place in a run, without the patterns of a sum."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)
