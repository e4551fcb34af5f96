"""One iteration of training: its place, its numbers, and what the processes tell of it.

The host queues work and runs ahead of the device. The numbers of an iteration (loss,
correct guesses, norm of the gradient) stay on the device and are copied to the host
while it queues the next iteration. They are read, summed over the processes, checked
and reported when the forward pass of the next iteration is queued, so that the device
has work in the meantime: see `train`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from slowfast_lara.engine.distributed import gather, sum_over_processes, world_size
from slowfast_lara.engine.optimizer import lr_at
from slowfast_lara.errors import RunError
from slowfast_lara.runs.checkpoint import Position


@dataclass(frozen=True)
class Iteration:
    """The place of a batch in training, and what follows from it."""

    epoch: int  # this and `batch` count from 0
    batch: int
    epoch_batches: int
    group_start: int  # the first batch of its group: those that share an optimiser step
    group_size: int
    lr: float  # of the optimiser step

    @property
    def ends_group(self) -> bool:
        """Whether the optimiser steps after this batch."""
        return self.batch + 1 == self.group_start + self.group_size

    @property
    def ends_epoch(self) -> bool:
        return self.batch + 1 == self.epoch_batches

    @property
    def position_after(self) -> Position:
        return Position(self.epoch + 1) if self.ends_epoch else Position(self.epoch, self.batch + 1)

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch + 1}, iteration {self.batch + 1} of {self.epoch_batches}, "
            f"learning rate {self.lr:g}"
        )


def iteration_at(
    cfg: CfgNode, epoch: int, batch: int, epoch_batches: int, lr_scale: float
) -> Iteration:
    steps = cfg.SOLVER.ACCUMULATE_STEPS
    start = batch // steps * steps
    # An epoch's last group may have fewer batches than the others.
    size = min(steps, epoch_batches - start)
    lr = lr_at(cfg, epoch + start / epoch_batches) * lr_scale
    return Iteration(epoch, batch, epoch_batches, start, size, lr)


class Numbers:
    """A few numbers on their way from the device to the host."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        # float32 holds them all, counts below 2**24 too; mps has nothing wider.
        packed = torch.stack([value.detach().float() for value in values])
        # From a GPU of NVIDIA this is a copy into pinned memory, which nobody waits for here.
        self._host = packed.to("cpu", non_blocking=packed.is_cuda)
        self._copied = torch.cuda.Event() if packed.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


@dataclass(frozen=True)
class Outcome:
    """An iteration whose work is queued, as one process knows it."""

    at: Iteration
    numbers: Numbers  # loss, first guesses and first five that are right, norm of the gradient
    indices: list[int]  # the videos of the batch
    group_indices: list[int]  # those of its group so far
    seconds: float
    data_seconds: float


@dataclass(frozen=True)
class Totals:
    """What one exchange tells, summed over the processes."""

    # Of the outcome that was exchanged, zero without one.
    loss: float
    top1: float
    top5: float
    count: float
    bad_losses: float
    bad_gradients: float
    # Of this moment.
    failures: float
    stop: float
    stalled: float


def exchange(
    outcome: Outcome | None, num_failures: int, stop: bool, stalled: bool = False
) -> Totals:
    """Tell all processes of an iteration and of this one's state, and hear of theirs.

    It returns when all processes have come to it: a process that failed on the way has
    closed its connections, and the others get an error here instead of a total.
    """
    loss, top1, top5, norm = outcome.numbers.read() if outcome else [0.0] * 4
    good_loss = math.isfinite(loss)
    mine = [
        loss if good_loss else 0.0,
        top1,
        top5,
        len(outcome.indices) if outcome else 0,
        not good_loss,
        not math.isfinite(norm),
        num_failures,
        stop,
        stalled,
    ]
    return Totals(*sum_over_processes([float(value) for value in mine]))


def check_finite(
    outcome: Outcome, totals: Totals, paths: Sequence[str], gradients_may_overflow: bool
) -> None:
    """Raise on all processes if the loss or the gradient of one is not finite.

    A gradient that is not finite comes from any batch of its group; all are named.
    """
    loss, _, _, norm = outcome.numbers.read()
    if totals.bad_losses:
        what, value, indices = "loss", loss, outcome.indices
    elif totals.bad_gradients and not gradients_may_overflow:
        what, value, indices = "gradient", norm, outcome.group_indices
    else:
        return
    shares = gather((value, [paths[index] for index in indices]))
    told = "; ".join(
        f"{value} in process {rank}, batch of {', '.join(names)}"
        for rank, (value, names) in enumerate(shares)
        if not math.isfinite(value)
    )
    raise RunError(
        f"the {what} is not finite at {outcome.at}: {told}. The last checkpoint is as it was."
    )


def mean_numbers(totals: Totals) -> dict[str, float]:
    """Loss and errors in percent over all processes, by their names in the log."""
    return {
        "loss": totals.loss / world_size(),
        "top1_err": 100 - 100 * totals.top1 / totals.count,
        "top5_err": 100 - 100 * totals.top5 / totals.count,
    }
