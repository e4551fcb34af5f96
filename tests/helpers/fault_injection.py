"""Faults injected into a training, at a chosen iteration of a chosen rank.

python -m tests.helpers.fault_injection FAULT ITERATION RANK FOLDER -- ARGUMENTS OF run_net.py
also writes the weights that each rank has in memory at the end to FOLDER/RANK.pth.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

from slowfast_lara.data.loader import TrainBatches
from slowfast_lara.engine.distributed import rank, unwrap_ddp
from slowfast_lara.engine.train import Trainer
from slowfast_lara.errors import DataError

LOSS_FAULTS = {
    "loss": lambda loss: loss * math.nan,
    "infinite loss": lambda loss: loss + math.inf,  # its gradients are finite
    "gradient": lambda loss: loss + 0 * (loss - loss.detach()).sqrt(),  # the loss is unchanged
}


def inject_fault(patch: Any, fault: str, iteration: int, in_rank: int = 0) -> None:
    """`patch(object, name, value)` sets an attribute, as `setattr` and pytest's monkeypatch do."""
    forward, batches = Trainer.forward, TrainBatches.__iter__
    calls = 0

    def broken_forward(self, *arguments):
        nonlocal calls
        calls += 1
        loss, correct = forward(self, *arguments)
        if calls != iteration or rank() != in_rank or fault == "loader":
            return loss, correct
        if fault == "forward":
            raise ArithmeticError("the forward pass is broken")
        if fault == "data":
            raise DataError("the data is broken")
        return LOSS_FAULTS[fault](loss), correct

    def broken_batches(self):
        for i, batch in enumerate(batches(self), 1):
            if i == iteration and rank() == in_rank and fault == "loader":
                raise ArithmeticError("the loader is broken")
            yield batch

    patch(Trainer, "forward", broken_forward)
    patch(TrainBatches, "__iter__", broken_batches)


def keep_weights(patch: Any, folder: Path) -> None:
    """Write the weights in memory to disk when a training ends, also by an error."""
    run = Trainer.run

    def run_and_keep(self):
        try:
            run(self)
        finally:
            torch.save(unwrap_ddp(self.model).state_dict(), folder / f"{rank()}.pth")

    patch(Trainer, "run", run_and_keep)


if __name__ == "__main__":
    from tests.helpers.commands import run as main

    fault, iteration, in_rank, folder, _, *arguments = sys.argv[1:]
    inject_fault(setattr, fault, int(iteration), int(in_rank))
    keep_weights(setattr, Path(folder))
    sys.exit(main(arguments))
