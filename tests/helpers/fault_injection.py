"""Trainings that break at a chosen iteration, in a process of one's choice.

python -m tests.helpers.fault_injection WHAT ITERATION RANK FOLDER -- ARGUMENTS OF run_net.py
also leaves the weights that each process had in memory at the end, in FOLDER/RANK.pth.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

from slowfast_lara.data.loader import TrainBatches
from slowfast_lara.engine.distributed import rank, without_ddp
from slowfast_lara.engine.train import Trainer
from slowfast_lara.errors import DataError

BREAKS = {
    "loss": lambda loss: loss * math.nan,
    "infinite loss": lambda loss: loss + math.inf,  # its gradients are finite
    "gradient": lambda loss: loss + 0 * (loss - loss.detach()).sqrt(),  # the loss is as it was
}


def break_training(patch: Any, what: str, iteration: int, in_rank: int = 0) -> None:
    """`patch(object, name, value)` is to set attributes, as pytest's monkeypatch does."""
    forward, batches = Trainer._forward, TrainBatches.__iter__
    calls = 0

    def broken_forward(self, *arguments):
        nonlocal calls
        calls += 1
        loss, correct = forward(self, *arguments)
        if calls != iteration or rank() != in_rank or what == "loader":
            return loss, correct
        if what == "forward":
            raise ArithmeticError("the forward pass is broken")
        if what == "data":
            raise DataError("the data is broken")
        return BREAKS[what](loss), correct

    def broken_batches(self):
        for i, batch in enumerate(batches(self), 1):
            if i == iteration and rank() == in_rank and what == "loader":
                raise ArithmeticError("the loader is broken")
            yield batch

    patch(Trainer, "_forward", broken_forward)
    patch(TrainBatches, "__iter__", broken_batches)


def keep_weights(patch: Any, folder: Path) -> None:
    """Write the weights in memory when a training ends, however it ends."""
    run = Trainer.run

    def run_and_keep(self):
        try:
            run(self)
        finally:
            torch.save(without_ddp(self.model).state_dict(), folder / f"{rank()}.pth")

    patch(Trainer, "run", run_and_keep)


if __name__ == "__main__":
    from tests.helpers.commands import run as main

    what, iteration, in_rank, folder, _, *arguments = sys.argv[1:]
    break_training(setattr, what, int(iteration), int(in_rank))
    keep_weights(setattr, Path(folder))
    sys.exit(main(arguments))
