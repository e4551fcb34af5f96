"""Training loop, from the start or from the newest checkpoint to the last epoch.

Before every batch the random generators are seeded from (RNG_SEED, rank, epoch, batch). Drop
path, estimator noise and mixup then depend on the position in the training only, so that an
interrupted run resumes bit for bit.

The host does not wait for the results of the current iteration. Between the forward and the
backward pass, a collective exchanges the metrics of the previous iteration (see `iteration`). The
backward pass sums gradients over the ranks, so a rank that entered it alone would hang. Therefore:

- An exception in the loader or the forward pass ends the process and closes its connections, and
  the other ranks raise an error in the collective. Before it ends, the process completes the work
  queued on its device, because other ranks may be summing gradients with this rank.
- The collective also shares signals, bad videos and non-finite metrics, so that all ranks stop
  after the same optimiser step or raise the same error. If, after a signal, the next batch of one
  rank does not arrive, all ranks save the state after the last optimiser step and stop.
- If a rank is killed, or raises inside the backward pass, its gloo connections break, and the
  other ranks raise an error. NCCL connections do not break; `heartbeat` ends the other ranks.

If the loss of one rank is not finite, its gradients are NaN. The sum over the ranks is then NaN on
all ranks, and all ranks skip the optimiser step. They raise an error about the loss before
they write a checkpoint of this iteration.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch
from slowfast.utils.checkpoint import is_checkpoint_epoch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from slowfast_lara.data.bad_videos import BadVideos, Failure
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.loader import Batch, TrainBatches
from slowfast_lara.engine.batch_copies import BatchCopies
from slowfast_lara.engine.distributed import all_gather, rank, world_size
from slowfast_lara.engine.evaluate import validate
from slowfast_lara.engine.iteration import (
    AsyncScalars,
    Iteration,
    LossScaleCheck,
    PendingIteration,
    check_finite,
    exchange,
    iteration_at,
)
from slowfast_lara.engine.metrics import accuracy_names, classification_loss, count_correct
from slowfast_lara.engine.mixup import draw_mix, main_labels, mix_clips, mixed_loss
from slowfast_lara.engine.optimizer import batch_lr_factor, set_lr, step_if_finite
from slowfast_lara.engine.profile import StepProfiler
from slowfast_lara.engine.progress import TrainProgress
from slowfast_lara.engine.shutdown import is_connection_loss
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.engine.throughput import Throughput
from slowfast_lara.engine.train_state import TrainState
from slowfast_lara.errors import Stopped, counted
from slowfast_lara.inference.scoring import autocast
from slowfast_lara.labels import label_kind
from slowfast_lara.models.attention_config import display_name
from slowfast_lara.models.build import device_of
from slowfast_lara.runs.checkpoint import TrainingPosition

logger = logging.getLogger(__name__)


class Trainer:
    """The training loop over epochs and batches."""

    def __init__(
        self, state: TrainState, train_loader: DataLoader, val_loader: DataLoader, stop: StopRequest
    ) -> None:
        cfg = state.cfg
        self.cfg, self.state, self.stop = cfg, state, stop
        self.train_loader, self.val_loader = train_loader, val_loader
        self.dataset = cast(VideoDataset, train_loader.dataset)
        self.model, self.optimizer, self.scaler = state.model, state.optimizer, state.scaler
        self.step_batch = state.global_batch * cfg.SOLVER.ACCUMULATE_STEPS
        self.lr_factor = batch_lr_factor(cfg, self.step_batch)
        self.kind = label_kind(cfg)
        self.accuracies = accuracy_names(self.kind)
        throughput = Throughput(cfg, state.global_batch // world_size())
        self.progress = TrainProgress(cfg, len(train_loader), self.accuracies, throughput)
        self.profiler = StepProfiler(cfg)
        self.bad_videos = BadVideos(len(self.dataset), cfg.DATA.MAX_BAD_SHARE)
        self.copies = BatchCopies(cfg, device_of(cfg))
        self.check_loss_scale = LossScaleCheck()
        # Whether any rank has received a signal; equal on all ranks.
        self.stopping = False
        # Training position of the current weights: after the last optimiser step, or the start.
        self.position = state.start
        # The previous iteration, until its metrics are exchanged.
        self.pending: PendingIteration | None = None

    def run(self) -> None:
        """Train until SOLVER.MAX_EPOCH or a stop request."""
        try:
            self._run_epochs()
        except Exception as error:
            if torch.cuda.is_initialized() and not is_connection_loss(error):
                with contextlib.suppress(RuntimeError):  # raised if a queued kernel failed
                    torch.cuda.synchronize()
            raise
        finally:
            self.state.writer.close()  # after an error, complete the last checkpoint
            self.progress.close()

    def _run_epochs(self) -> None:
        self._log_start()
        val_dataset = cast(VideoDataset, self.val_loader.dataset)
        self.progress.show_clips(val_dataset, self.state.class_names)
        epochs, start = self.cfg.SOLVER.MAX_EPOCH, self.state.start
        if self.cfg.TRAIN.CHECKPOINT_BEST and start.epochs and not start.batches:
            # The run may have been interrupted after saving this checkpoint, before validating it.
            self._validate(start.epochs - 1)
            self.progress.log_epoch(start.epochs - 1)
        self.model.train()
        for epoch in range(start.epochs, epochs):
            self._train_epoch(epoch, start.batches if epoch == start.epochs else 0)
            is_last = epoch + 1 == epochs
            if is_last or is_checkpoint_epoch(epoch, self.cfg.TRAIN.CHECKPOINT_PERIOD):
                self._save(TrainingPosition(epoch + 1))
            self._validate(epoch)
            self.progress.log_epoch(epoch)
        self.profiler.close()
        self.state.finish_writing()

    def _train_epoch(self, epoch: int, first_batch: int) -> None:
        total = len(self.train_loader)
        cast(TrainBatches, self.train_loader.batch_sampler).set_epoch(epoch, first_batch)
        self.progress.start_epoch(epoch, first_batch)
        self.optimizer.zero_grad(set_to_none=True)
        group_indices: list[int] = []
        batches = self.stop.batches(self.train_loader)
        for i, batch in enumerate(self.progress.timed(batches), first_batch):
            self.profiler.start_batch()
            self.state.writer.check()
            iteration = iteration_at(self.cfg, epoch, i, total, self.lr_factor)
            metrics = self._train_batch(batch, iteration)
            indices = batch.indices.tolist()
            group_indices = indices if i == iteration.group_start else group_indices + indices
            lap = self.progress.lap()
            self.pending = PendingIteration(iteration, metrics, indices, group_indices, lap)
            if iteration.ends_group:
                self.position = iteration.position_after
                self._save_within_epoch(iteration)
        if self.stop.stalled:  # other ranks may wait in this collective
            self._exchange()
        self._flush()
        self.progress.end_epoch()

    def _train_batch(self, batch: Batch, iteration: Iteration) -> AsyncScalars:
        seed = batch_seed(self.cfg.RNG_SEED, rank(), iteration.epoch, iteration.batch)
        torch.manual_seed(seed)
        sync: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(self.model, DistributedDataParallel) and not iteration.ends_group:
            sync = self.model.no_sync()  # all-reduce only after the last batch of a group
        with sync:
            loss, correct = self.forward(batch, seed)
            self._exchange(batch.failures)  # raises on all ranks or on none
            # An infinite loss may have finite gradients. Make them NaN, so that all ranks get NaN.
            factor = torch.where(loss.detach().isfinite(), 1.0, math.nan)
            self.scaler.scale(loss * factor / iteration.group_size).backward()
        grad_norm = self._step(iteration) if iteration.ends_group else torch.zeros_like(loss)
        loss_scale = self.scaler.scale(torch.ones_like(loss.detach()))
        return AsyncScalars([loss, grad_norm, loss_scale, *correct])

    def forward(self, batch: Batch, seed: int) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the numbers of correct predictions, on the device."""
        clips, labels = self.copies(batch)
        height, width = clips[0].shape[-2:]
        mix = draw_mix(self.cfg.MIXUP, height, width, seed)
        with autocast(self.cfg, labels.device):
            logits = self.model([mix_clips(clip, mix) for clip in clips])
        logits = logits.float()
        smoothing = self.cfg.SOLVER.SMOOTHING
        loss = mixed_loss(
            lambda labels: classification_loss(logits, labels, self.kind, smoothing), labels, mix
        )
        scores = logits.detach()
        if self.kind.is_pair:  # ranking actions needs probabilities, not logits
            scores = torch.cat([x.softmax(1) for x in self.kind.split(scores).values()], dim=1)
        return loss, count_correct(scores, main_labels(labels, mix), self.kind)

    def _step(self, iteration: Iteration) -> Tensor:
        """Run the optimiser step of a group; return the gradient norm before clipping."""
        set_lr(self.optimizer, iteration.lr)
        self.scaler.unscale_(self.optimizer)
        norm = self._clip_gradients()
        if self.scaler.is_enabled():  # GradScaler skips the step on overflow
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            step_if_finite(self.optimizer, norm)
        self.optimizer.zero_grad(set_to_none=True)
        if self.state.ema is not None:
            self.state.ema.update()
        return norm

    def _clip_gradients(self) -> Tensor:
        """Clip the gradient norm to SOLVER.CLIP_GRAD, unless it is None; return the norm before."""
        parameters, largest = list(self.model.parameters()), self.cfg.SOLVER.CLIP_GRAD
        if largest:  # clip_grad_norm_ does not synchronise with the device
            return torch.nn.utils.clip_grad_norm_(parameters, largest)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def _exchange(self, failures: Sequence[Failure] = ()) -> None:
        """Combine the pending metrics, failed videos and stop requests of all ranks.

        Then check and log the metrics.
        """
        pending, self.pending = self.pending, None
        totals = exchange(pending, len(failures), self.stop.requested, self.stop.stalled)
        if pending is not None:
            overflow = self.scaler.is_enabled()
            check_finite(pending, totals, self.dataset.paths, gradients_may_overflow=overflow)
            self.check_loss_scale(pending)
            self.progress.update(pending, totals.mean_metrics(self.accuracies))
        if totals.failures:
            for failures_of_rank in all_gather(list(failures)):
                self.bad_videos.add(failures_of_rank)
        self.stopping = self.stopping or totals.stop_requests > 0
        if totals.stalled:  # one rank has no batch: all ranks discard this batch
            self._save_and_stop(self.position)

    def _flush(self) -> None:
        """Check and log the pending iteration, if there is one."""
        if self.pending is not None:
            self._exchange()

    def _validate(self, epoch: int) -> None:
        is_last = epoch + 1 == self.cfg.SOLVER.MAX_EPOCH
        if not is_last and (epoch + 1) % self.cfg.TRAIN.EVAL_PERIOD:
            return
        stats = self._validation_stats()
        if stats is None:  # interrupted by a signal
            self._save_and_stop(TrainingPosition(epoch + 1))
        self.progress.log_validation(epoch, stats)
        if self.cfg.TRAIN.CHECKPOINT_BEST:
            self.state.save_if_best(TrainingPosition(epoch + 1), stats)

    def _validation_stats(self) -> dict[str, Any] | None:
        """Return the validation results; None after a stop request.

        With an EMA, these are the results of the EMA weights. The results of the raw weights,
        without video counts, are added with the prefix `raw_`: `raw_loss`, `raw_top1_err`, ...
        """
        compute_stats = partial(validate, self.model, self.val_loader, self.cfg, self.stop)
        stats = compute_stats()
        if stats is None or self.state.ema is None:
            return stats
        with self.state.ema.swapped_in():
            ema_stats = compute_stats()
        raw = {f"raw_{name}": x for name, x in stats.items() if not name.startswith("num_")}
        return None if ema_stats is None else {**ema_stats, **raw}

    def _save_within_epoch(self, at: Iteration) -> None:
        """Save and stop after a signal; else save every TRAIN.CHECKPOINT_ITERATIONS batches."""
        if self.stopping:
            self._save_and_stop(at.position_after)
        every = self.cfg.TRAIN.CHECKPOINT_ITERATIONS
        if every and not at.ends_epoch and (at.batch + 1) // every > at.group_start // every:
            self._save(at.position_after)

    def _save_and_stop(self, position: TrainingPosition) -> NoReturn:
        path = self._save(position)
        self.state.finish_writing()
        name = self.stop.signal_name or "a signal to another process"
        raise Stopped(f"stopped by {name}; saved {path}; the same command resumes from there")

    def _save(self, position: TrainingPosition) -> str:
        self._flush()  # before saving, check and log all iterations
        return self.state.save(position)

    def _log_start(self) -> None:
        cfg, solver = self.cfg, self.cfg.SOLVER
        parameters = sum(p.numel() for p in self.model.parameters()) / 1e6
        model = f"{cfg.MODEL.MODEL_NAME} with {display_name(cfg.VIT.APPROX_ATTN_TYPE)} attention"
        logger.info("%s: %.2f million parameters", model, parameters)
        logger.info(
            f"Effective batch {self.step_batch}: TRAIN.BATCH_SIZE {cfg.TRAIN.BATCH_SIZE} "
            f"* NUM_SHARDS {cfg.NUM_SHARDS} * SOLVER.ACCUMULATE_STEPS {solver.ACCUMULATE_STEPS}; "
            f"world size {world_size()}, {counted(len(self.train_loader), 'batch')} per epoch"
            + self._left_out()
        )
        logger.info(
            f"Learning rate {solver.BASE_LR * self.lr_factor:g}: SOLVER.BASE_LR {solver.BASE_LR:g} "
            f"* {self.lr_factor:g} (SOLVER.REFERENCE_BATCH {solver.REFERENCE_BATCH}), "
            f"{solver.OPTIMIZING_METHOD}, {solver.LR_POLICY}"
        )
        if solver.LR_POLICY == "cosine" and solver.WARMUP_EPOCHS >= solver.MAX_EPOCH:
            logger.warning(
                f"The learning rate stays below {solver.BASE_LR * self.lr_factor:g}: "
                f"SOLVER.WARMUP_EPOCHS is {solver.WARMUP_EPOCHS:g}, SOLVER.MAX_EPOCH "
                f"{solver.MAX_EPOCH}; set SOLVER.WARMUP_EPOCHS below SOLVER.MAX_EPOCH"
            )
        if not self.kind.is_pair:
            self._log_classes()
        if solver.LAYER_DECAY < 1:
            lowest = min(group["lr_scale"] for group in self.optimizer.param_groups)
            decay = solver.LAYER_DECAY
            text = "SOLVER.LAYER_DECAY %g: the learning rate of the embeddings is multiplied by %g"
            logger.info(text, decay, lowest)

    def _log_classes(self) -> None:
        """Warn if some classes have no training video: MODEL.NUM_CLASSES may be wrong."""
        labels = {label if isinstance(label, tuple) else (label,) for label in self.dataset.labels}
        used = len(set().union(*labels))
        if used < self.kind.num_classes:
            of_all = f"{used} of {self.kind.num_classes} classes (MODEL.NUM_CLASSES)"
            logger.warning("The training list has videos of only %s", of_all)

    def _left_out(self) -> str:
        """Describe the clips that each epoch omits because they do not fill a batch; "" if none."""
        number = len(self.dataset) % self.state.global_batch
        if not number:
            return ""
        return f"; each epoch leaves out {number} of {len(self.dataset)} clips, chosen at random"


def batch_seed(*position: int) -> int:
    """Hash (RNG_SEED, rank, epoch, batch) to a seed; their sum would be equal for many batches."""
    return int(np.random.SeedSequence(position).generate_state(1, np.uint64)[0] >> 1)
