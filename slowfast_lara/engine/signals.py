"""Ending on request: SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's warning).

The first signal asks for a checkpoint at the next optimiser step and an end with exit
code 75 (see `errors`). If the next batch does not come, because the workers of the loader
are stalled, the state after the last optimiser step is saved instead.

A second SIGTERM or SIGINT ends the process at once. A thread looks out for it: Python
itself acts on a signal only when the main thread comes back from a call into C, which may
wait for other processes for half an hour.
"""

from __future__ import annotations

import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from slowfast_lara.engine.shutdown import end_process
from slowfast_lara.errors import INTERRUPTED, print_error

T = TypeVar("T")

# Windows has neither SIGUSR1 nor a timer. There a run whose next batch does not come is ended by
# the second Ctrl-C alone.
_HAS_TIMER = hasattr(signal, "setitimer")
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)
# Slurm sends SIGTERM some time after the warning SIGUSR1: that is no second request.
_URGENT = (signal.SIGTERM, signal.SIGINT)
# One Ctrl-C or `scancel` reaches a process twice, by itself and by way of its launcher.
SAME_REQUEST_SECONDS = 0.3
# How long a batch is waited for after a signal.
PATIENCE_SECONDS = 5.0


class _Stalled(BaseException):
    """Raised into the wait for a batch that does not come; no `except Exception` keeps it."""


class StopRequest:
    """Set by a signal, asked by the loops of training and testing."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        # Whether the batches have ended early, because the next one did not come.
        self.stalled = False
        self._waiting_since: float | None = None
        self._listening = False

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def request(self, reason: str) -> None:
        """Ask for an end; of several reasons, the first is told."""
        self.signal_name = self.signal_name or reason
        if self._listening and _HAS_TIMER:  # see `_look_for_a_stall`
            signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)

    def listen(self, on_request: Callable[[], None] | None = None) -> StopRequest:
        """Take over the signals, in the main thread of a process.

        `on_request` is called in another thread at the first of them.
        """
        receiving, sending = socket.socketpair()
        sending.setblocking(False)
        signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
        watch = threading.Thread(
            target=self._watch, args=(receiving, sending, on_request), name="signals", daemon=True
        )
        watch.start()
        for number in SIGNALS:
            signal.signal(number, self._receive)
        if _HAS_TIMER:
            signal.signal(signal.SIGALRM, self._look_for_a_stall)
        self._listening = True
        return self

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """What a loader yields. It ends early, `stalled`, if nothing comes after a request."""
        try:
            self._waiting_since = time.monotonic()
            for batch in loader:
                self._waiting_since = None
                yield batch
                self._waiting_since = time.monotonic()
        except _Stalled:
            self.stalled = True
        finally:
            self._waiting_since = None

    def _receive(self, number: int, _frame: Any) -> None:
        self.request(signal.Signals(number).name)

    def _look_for_a_stall(self, _number: int, _frame: Any) -> None:
        since = self._waiting_since
        if self.requested and since is not None and time.monotonic() - since > PATIENCE_SECONDS:
            self._waiting_since = None
            raise _Stalled

    def _watch(
        self,
        receiving: socket.socket,
        _kept_open: socket.socket,
        on_request: Callable[[], None] | None,
    ) -> None:
        urgent_since: float | None = None
        while True:
            for number in receiving.recv(4096):
                if number in SIGNALS:  # `_receive` waits for the main thread
                    self.request(signal.Signals(number).name)
                    if on_request is not None:
                        on_request()
                        on_request = None
                if number not in _URGENT:
                    continue
                if urgent_since is None:
                    urgent_since = time.monotonic()
                elif time.monotonic() - urgent_since > SAME_REQUEST_SECONDS:
                    print_error("interrupted; nothing was saved since the last checkpoint")
                    end_process(INTERRUPTED)


def ignore_signals() -> None:
    """For a process that ends, its exit code being settled, and for one that heeds its parent.

    While Python ends, it gives the signals back to the system: one that comes then would kill the
    process, which would seem not to have saved. So would the timer of `request`.
    """
    if _HAS_TIMER:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (*SIGNALS, *([signal.SIGALRM] if _HAS_TIMER else [])):
        signal.signal(number, signal.SIG_IGN)


def shield_workers(loader: DataLoader) -> DataLoader:
    """Let the loader's workers outlive a signal sent to the whole process group.

    Slurm and a terminal signal every process; a worker that died of it would
    break the batch at which the main process wants to save. Workers end when
    their parent does.
    """
    loader.worker_init_fn = functools.partial(_init_shielded, loader.worker_init_fn)
    return loader


def _init_shielded(init: Callable[[int], None] | None, worker_id: int) -> None:
    ignore_signals()
    if init is not None:
        init(worker_id)
