"""Ending on request: SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning).

The first signal asks for a checkpoint at the next optimiser step and an end with
exit code 75 (see `errors`); a second Ctrl-C ends at once.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Set by a signal, asked by the loops of training and testing."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def listen(self) -> StopRequest:
        """Take over the signals, in the main thread of a process."""
        for number in SIGNALS:
            signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.signal_name == "SIGINT":
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


def shield_workers(loader: DataLoader) -> DataLoader:
    """Let the loader's workers outlive a signal sent to the whole process group.

    Slurm and a terminal signal every process; a worker that died of it would
    break the batch at which the main process wants to save. Workers end when
    their parent does.
    """
    loader.worker_init_fn = functools.partial(_init_shielded, loader.worker_init_fn)
    return loader


def _init_shielded(init: Callable[[int], None] | None, worker_id: int) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if init is not None:
        init(worker_id)
