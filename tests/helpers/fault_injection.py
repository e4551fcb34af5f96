"""Faults injected into a training, at a chosen iteration of a chosen rank.

python -m tests.helpers.fault_injection FAULT ITERATION RANK FOLDER DELAY -- ARGUMENTS OF run_net.py
also writes the weights that each rank has in memory at the end to FOLDER/RANK.pth, and delays the
report of the failing rank by DELAY seconds.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from slowfast_lara import errors
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


def delay_report(patch: Any, seconds: float, in_rank: int) -> None:
    """Delay the error message of a rank."""
    print_error = errors.print_error

    def print_late(message: str) -> None:
        time.sleep(seconds if rank() == in_rank else 0)
        print_error(message)

    patch(errors, "print_error", print_late)


if __name__ == "__main__":
    from tests.helpers.commands import run as main

    fault, iteration, in_rank, folder, delay, _, *arguments = sys.argv[1:]
    delay_report(setattr, float(delay), int(in_rank))
    inject_fault(setattr, fault, int(iteration), int(in_rank))
    keep_weights(setattr, Path(folder))
    sys.exit(main(arguments))
