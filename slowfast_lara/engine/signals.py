"""Graceful stop on SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 (Slurm's early warning).

After the first signal, a training run saves a checkpoint at the next optimiser step, and a test run
stops after the current video. The exit code is 75 (see `errors`). If the next training batch does
not arrive because the DataLoader workers hang, the state after the last optimiser step is saved.

A second SIGTERM or SIGINT ends the process immediately. A separate thread watches for it, because
Python runs signal handlers only when the main thread returns from C code, where it may wait half an
hour for other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from slowfast_lara.engine.shutdown import end_process
from slowfast_lara.errors import INTERRUPTED, Stopped, print_error

T = TypeVar("T")

# Windows has neither SIGUSR1 nor interval timers. On Windows, a run whose next batch does not
# arrive ends only at a second Ctrl-C.
_HAS_TIMER = hasattr(signal, "setitimer")
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)
# The second of these signals ends the process. SIGUSR1 is not counted: Slurm sends SIGTERM later.
_URGENT = (signal.SIGTERM, signal.SIGINT)
# Signals within this time count once: one Ctrl-C may arrive directly and through the launcher.
SAME_REQUEST_SECONDS = 0.3
# After a signal, a wait for a batch ends when it has lasted this long, counted from its start.
PATIENCE_SECONDS = 5.0


class _Stalled(BaseException):
    """Interrupts the wait for a batch; a BaseException, which `except Exception` does not catch."""


class StopRequest:
    """A request to stop, set by a signal and polled by the training and test loops."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        # Whether `batches` ended early because the next batch did not arrive.
        self.stalled = False
        self._waiting_since: float | None = None
        self._listening = False

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def request(self, reason: str) -> None:
        """Request a stop; only the reason of the first request is kept."""
        self.signal_name = self.signal_name or reason
        if self._listening and _HAS_TIMER:  # call `_on_timer` every second
            signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)

    def check(self) -> None:
        """Raise Stopped after a signal; called while this process waits for other ranks."""
        if self.requested:
            raise Stopped("stopped by a signal before all ranks joined; there was nothing to save")

    def listen(self, on_request: Callable[[], None] | None = None) -> StopRequest:
        """Install the signal handlers; must be called in the main thread.

        `on_request` is called in another thread at the first signal.
        """
        # If the parent of this process ignores SIGCHLD, so does this process: it could never tell
        # that a child has exited.
        if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        receiver, self._sender = socket.socketpair()  # `_sender` keeps the socket open
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        arguments = receiver, on_request
        threading.Thread(target=self._watch, args=arguments, name="signals", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        if _HAS_TIMER:
            signal.signal(signal.SIGALRM, self._on_timer)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see `deferred_signals`
        self._listening = True
        return self

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader; set `stalled` and end if no batch arrives after a stop request."""
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

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.request(signal.Signals(number).name)

    def _on_timer(self, _number: int, _frame: Any) -> None:
        since = self._waiting_since
        if self.requested and since is not None and time.monotonic() - since > PATIENCE_SECONDS:
            self._waiting_since = None
            raise _Stalled

    def _watch(self, receiver: socket.socket, on_request: Callable[[], None] | None) -> None:
        urgent_since: float | None = None
        while True:
            for number in receiver.recv(4096):
                if number in SIGNALS:  # do not wait for `_on_signal`, which may run much later
                    self.request(signal.Signals(number).name)
                    if on_request is not None:
                        on_request()
                        on_request = None
                if number not in _URGENT:
                    continue
                if urgent_since is None:
                    urgent_since = time.monotonic()
                elif time.monotonic() - urgent_since > SAME_REQUEST_SECONDS:
                    print_error("interrupted; training since the last checkpoint is not saved")
                    end_process(INTERRUPTED)


def ignore_signals() -> None:
    """Ignore the stop signals and the timer, in workers and during interpreter shutdown.

    During shutdown, Python restores the default handlers. A signal, or the timer started by
    `request`, would then kill the process and change its exit code.
    """
    if _HAS_TIMER:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (*SIGNALS, *([signal.SIGALRM] if _HAS_TIMER else [])):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Keep stop signals pending in processes that start in the context, until they `listen`.

    Otherwise a signal during their imports would kill them, instead of making them save and stop.
    """
    if _HAS_TIMER:
        # Start the resource tracker before blocking: its start unblocks SIGINT and SIGTERM.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        if _HAS_TIMER:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def shield_workers(loader: DataLoader) -> DataLoader:
    """Make the workers of a loader ignore the stop signals; workers exit when their parent exits.

    Slurm and terminals send signals to every process. If a worker died, the main process could
    not get the batches that it needs to reach the next optimiser step and save.
    """
    loader.worker_init_fn = functools.partial(_init_worker, loader.worker_init_fn)
    return loader


def _init_worker(init: Callable[[int], None] | None, worker_id: int) -> None:
    ignore_signals()
    if init is not None:
        init(worker_id)
