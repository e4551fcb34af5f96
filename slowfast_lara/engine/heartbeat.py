"""Detection of lost ranks within half a minute.

A collective fails when a peer dies. That is not enough, because a test runs no collectives for a
long time, and a machine that loses power does not close its connections. Each rank therefore
increments its own counter in the TCP store every few seconds and watches the counter of the next
rank. If that counter stops, the rank reports the next rank as lost to all ranks.

Calls to the store have no reliable timeout: they block while the machine of the store is
unreachable or its process is suspended. A watchdog thread checks that the calls return.

The heartbeat and the watchdog threads count their own periods, not seconds. Suspending and
continuing a whole job therefore does not look like a lost rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from slowfast_lara.engine.shutdown import end_process
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import FAILED, print_error

PERIOD = 3.0  # seconds
# A loss is detected after 7 periods, and all ranks read it at most 2 periods later: within 30 s.
MISSED_BEATS = 7
STORE = "the TCP store of the run"


class Heartbeat:
    """Ends this process when another rank or the store is lost; shares stop requests.

    The training loop also exchanges stop requests, once per batch. That is not enough, because a
    test runs no collectives, and the next batch of a training may never arrive.

    The constructor starts the watchdog thread; `start` starts the heartbeat thread.
    """

    def __init__(self, rank: int, world_size: int, stop: StopRequest) -> None:
        self._rank, self._peer = rank, (rank + 1) % world_size
        self._stop_request = stop
        self._calls = 0
        self._peer_count, self._missed = 0, 0
        self._stopped = threading.Event()
        threading.Thread(target=self._watch_calls, name="watchdog", daemon=True).start()

    def mark_alive(self) -> None:
        """Record that a call to the store returned."""
        self._calls += 1

    def start(self, store: dist.Store, on_beat: Callable[[], None]) -> None:
        """Start the heartbeat thread, which calls `on_beat` in every period.

        `store` must not share its connection with the process group, which may block the
        connection for minutes.
        """
        self._store, self._on_beat = store, on_beat
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop both threads; call this before the process group is destroyed."""
        self._stopped.set()
        # Python aborts if it exits while another thread is inside PyTorch.
        self._thread.join(timeout=10)

    def _watch_calls(self) -> None:
        last, missed = self._calls, 0
        while missed < MISSED_BEATS:
            if self._stopped.wait(PERIOD):
                return
            last, missed = self._calls, missed + 1 if self._calls == last else 0
        self._end_process(STORE)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD):
            try:
                lost = self._beat()
            except RuntimeError:
                lost = STORE
            # In a regular shutdown, rank 0 may close the store just before this rank calls `stop`.
            if lost and not self._stopped.wait(1.0):
                self._end_process(lost)

    def _beat(self) -> str:
        """Increment this rank's counter and check the next rank's; return the lost rank, or ""."""
        self._store.add(f"beats/{self._rank}", 1)
        count = self._store.add(f"beats/{self._peer}", 0)
        self._missed = self._missed + 1 if count == self._peer_count else 0
        self._peer_count = count
        if self._missed == MISSED_BEATS:
            self._store.set("lost", str(self._peer + 1))  # 0 means that no rank is lost
        lost = self._store.add("lost", 0)
        if self._store.add("stop requests", int(self._stop_request.requested)):
            self._stop_request.request("a signal to another process")
        self._on_beat()
        self.mark_alive()
        return f"rank {lost - 1}" if lost else ""

    def _end_process(self, lost: str) -> None:
        print_error(f"rank {self._rank} exits: lost {lost}")
        end_process(FAILED)
