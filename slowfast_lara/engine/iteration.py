"""One training iteration: its position, its metrics, and their exchange between the ranks.

The host queues work and runs ahead of the device. The metrics of iteration i (loss, correct
predictions, gradient norm) are copied asynchronously. The host first queues the forward pass of
iteration i + 1, so that the device has work, and then reads the metrics of iteration i, sums them
over the ranks, checks and logs them (see `train`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from slowfast_lara.engine.distributed import all_gather, all_reduce_sum, world_size
from slowfast_lara.engine.optimizer import lr_at
from slowfast_lara.errors import RunError
from slowfast_lara.runs.checkpoint import TrainingPosition

logger = logging.getLogger(__name__)

# The loss scale of float16 starts at 65536 and is halved at every skipped step.
LOW_LOSS_SCALE, COLLAPSED_LOSS_SCALE = 1.0, 2.0**-16


@dataclass(frozen=True)
class Iteration:
    """One training batch. The batches accumulated for one optimiser step form a group."""

    epoch: int  # counts from 0, as does `batch`
    batch: int
    epoch_batches: int
    group_start: int  # index of the first batch of the group
    group_size: int
    lr: float  # learning rate of the group's optimiser step

    @property
    def ends_group(self) -> bool:
        """Whether an optimiser step follows this batch."""
        return self.batch + 1 == self.group_start + self.group_size

    @property
    def ends_epoch(self) -> bool:
        return self.batch + 1 == self.epoch_batches

    @property
    def position_after(self) -> TrainingPosition:
        if self.ends_epoch:
            return TrainingPosition(self.epoch + 1)
        return TrainingPosition(self.epoch, self.batch + 1)

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch + 1}, iteration {self.batch + 1} of {self.epoch_batches}, "
            f"learning rate {self.lr:g}"
        )


def iteration_at(
    cfg: CfgNode, epoch: int, batch: int, epoch_batches: int, lr_factor: float
) -> Iteration:
    steps = cfg.SOLVER.ACCUMULATE_STEPS
    start = batch // steps * steps
    size = min(steps, epoch_batches - start)  # the last group of an epoch may be smaller
    lr = lr_at(cfg, epoch + start / epoch_batches) * lr_factor
    return Iteration(epoch, batch, epoch_batches, start, size, lr)


class AsyncScalars:
    """Scalars that are copied asynchronously from the device to the host."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        # float32 is exact for counts below 2**24; mps has no float64.
        packed = torch.stack([value.detach().float() for value in values])
        # With CUDA this is a non-blocking copy into pinned memory.
        self._host = packed.to("cpu", non_blocking=packed.is_cuda)
        self._copied = torch.cuda.Event() if packed.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[float]:
        """Wait until the copy to the host is complete; return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


@dataclass(frozen=True)
class PendingIteration:
    """An iteration that is queued on the device and whose metrics the host has not read yet."""

    iteration: Iteration
    metrics: AsyncScalars  # loss, gradient norm, loss scale, counts of `metrics.count_correct`
    indices: list[int]  # indices of the videos of the batch
    group_indices: list[int]  # indices of the videos of the group, including this batch
    times: dict[str, float]  # log key -> duration in seconds


@dataclass(frozen=True)
class ExchangedTotals:
    """Metrics and batch states after `exchange`, summed over all ranks."""

    # Sums for the pending iteration; 0 if no iteration is pending.
    loss: float  # sum of the finite losses
    count: float  # number of clips
    bad_losses: float  # number of ranks whose loss is not finite
    bad_gradients: float  # number of ranks whose gradient norm is not finite
    # Counts for the current batch: bad videos, ranks with a stop request, ranks without a batch.
    failures: float
    stop_requests: float
    stalled: float
    # Correct predictions in the pending iteration; empty if no iteration is pending.
    correct: list[float] = field(kw_only=True)

    def mean_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return the mean loss and the errors in percent as {log key: value}.

        `names` are the names of the counts in `correct`.
        """
        errors = {
            f"{name}_err": 100 - 100 * correct / self.count
            for name, correct in zip(names, self.correct)
        }
        return {"loss": self.loss / world_size(), **errors}


def exchange(
    pending: PendingIteration | None, num_failures: int, stop: bool, stalled: bool
) -> ExchangedTotals:
    """Sum the metrics of the pending iteration, and the state of the current batch, over all ranks.

    This is a collective. If a rank fails before this call, its connections close, and the call
    raises an error on the other ranks.
    """
    loss, grad_norm, _, *correct = pending.metrics.read() if pending else [0.0] * 3
    finite_loss = math.isfinite(loss)
    local = [
        loss if finite_loss else 0.0,
        len(pending.indices) if pending else 0,
        not finite_loss,
        not math.isfinite(grad_norm),
        num_failures,
        stop,
        stalled,
    ]
    totals = all_reduce_sum([float(value) for value in (*local, *correct)])
    return ExchangedTotals(*totals[: len(local)], correct=totals[len(local) :])


def check_finite(
    pending: PendingIteration,
    totals: ExchangedTotals,
    paths: Sequence[str],
    gradients_may_overflow: bool,
) -> None:
    """Raise RunError on all ranks if the loss or the gradient of any rank is not finite.

    If `gradients_may_overflow`, because the loss is scaled, check the loss only. For each rank with
    a value that is not finite, the error lists the videos of the batch or, for a gradient, of all
    accumulated batches.
    """
    loss, grad_norm, *_ = pending.metrics.read()
    if totals.bad_losses:
        name, value, indices = "loss", loss, pending.indices
    elif totals.bad_gradients and not gradients_may_overflow:
        name, value, indices = "gradient", grad_norm, pending.group_indices
    else:
        return
    by_rank = all_gather((value, [paths[index] for index in indices]))
    details = "; ".join(
        f"{value} on rank {rank}, videos {', '.join(names)}"
        for rank, (value, names) in enumerate(by_rank)
        if not math.isfinite(value)
    )
    raise RunError(
        f"the {name} is not finite at {pending.iteration}: {details}. "
        "The last checkpoint is unchanged."
    )


class LossScaleCheck:
    """Reports a collapse of the loss scale; all ranks have the same scale and raise together."""

    def __init__(self) -> None:
        self._is_low = False

    def __call__(self, pending: PendingIteration) -> None:
        """Warn when the scale falls below LOW_LOSS_SCALE.

        Raise RunError if it is below COLLAPSED_LOSS_SCALE.
        """
        scale = pending.metrics.read()[2]
        if scale < COLLAPSED_LOSS_SCALE:
            raise RunError(
                f"the loss scale fell to {scale:g} at {pending.iteration}: the gradients overflow "
                "in float16, and optimiser steps are skipped; set SOLVER.PRECISION bfloat16 or "
                "SOLVER.USE_MIXED_PRECISION False, or lower SOLVER.BASE_LR"
            )
        if scale < LOW_LOSS_SCALE and not self._is_low:
            where = pending.iteration
            logger.warning("Low loss scale %g at %s: float16 gradients overflow", scale, where)
        self._is_low = scale < LOW_LOSS_SCALE
