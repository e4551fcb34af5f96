"""Noticing within half a minute that another process of the run is gone.

A collective fails when a peer dies, but evaluation has none for a long time, and
a machine that loses power closes no connection. So each process counts up in
the run's key-value store, watches the next one's count, and tells all of a death.

A call to the store has no time limit that can be relied on: it stays away for as
long as the store's machine is cut off or its process stopped. So a second thread
looks whether the calls come back.

Everything is counted in turns of these threads, not in time: a job that is suspended
as a whole, and goes on later, loses nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from slowfast_lara.engine.shutdown import end_process
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import FAILED, print_error

PERIOD = 3.0
# 7 turns until a loss is seen, at most 2 more until all have read of it: under 30 s.
MISSED_BEATS = 7
STORE = "the process that keeps the run's store, or the way to it,"


class Watchdog(threading.Thread):
    """Ends this process when no call to the store has come back for too many turns."""

    def __init__(self, rank: int) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._rank = rank
        self._calls = 0
        self._stopped = threading.Event()

    def mark_alive(self) -> None:
        """Called after each call to the store."""
        self._calls += 1

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        last, missed = self._calls, 0
        while missed < MISSED_BEATS:
            if self._stopped.wait(PERIOD):
                return
            last, missed = self._calls, missed + 1 if self._calls == last else 0
        _end(STORE, self._rank)


class Heartbeat(threading.Thread):
    """Ends this process when another one is lost; `stop` it before leaving.

    `store` is a connection of its own: the process group's may be busy for minutes.
    `each_beat` is called at each turn.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        watchdog: Watchdog,
        each_beat: Callable[[], None],
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._store, self._watchdog, self._each_beat = store, watchdog, each_beat
        self._rank, self._peer = rank, (rank + 1) % world_size
        self._last, self._missed = 0, 0
        self._stopped = threading.Event()
        self._stop_request: StopRequest | None = None

    def share(self, request: StopRequest) -> None:
        """Tell the others of a signal to this process, and this one of theirs.

        Training tells of it at each batch; but a test has no exchange, and a batch may
        not come.
        """
        self._stop_request = request

    def stop(self) -> None:
        self._watchdog.stop()
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(PERIOD):
            try:
                lost = self._beat()
            except RuntimeError:
                lost = STORE
            # At a regular end, the store's keeper may be the first to leave.
            if lost and not self._stopped.wait(1.0):
                _end(lost, self._rank)

    def _beat(self) -> str:
        """Count up, and say who is lost, if anybody."""
        self._store.add(f"beats/{self._rank}", 1)
        count = self._store.add(f"beats/{self._peer}", 0)
        self._last, self._missed = count, self._missed + 1 if count == self._last else 0
        if self._missed == MISSED_BEATS:
            self._store.set("lost", str(self._peer + 1))  # 0 is nobody
        lost = self._store.add("lost", 0)
        request = self._stop_request
        if request is not None and self._store.add("stop requests", int(request.requested)):
            request.request("a signal to another process")
        self._each_beat()
        self._watchdog.mark_alive()
        return f"process {lost - 1}" if lost else ""


def _end(lost: str, rank: int) -> None:
    print_error(f"{lost} of this run is gone, so process {rank} ends")
    end_process(FAILED)
