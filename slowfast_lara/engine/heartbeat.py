"""Detection of lost ranks within half a minute.

A collective fails when a peer dies. That is not enough, because a test runs no collectives for a
long time, and a machine that loses power does not close its connections. Each rank therefore
increments its own counter in the TCP store every few seconds and watches the counter of the next
rank. If that counter stops, the rank reports the next rank as lost to all ranks.

Calls to the store have no reliable timeout: they block while the machine that serves the store is
unreachable, or while the serving process is suspended. A watchdog thread ends this process if the
calls do not return.

A rank that fails writes its error to the store. The other ranks notice the lost connection, read
the error and report it, so that the log of every node has it. If rank 0 serves the store, the store
closes when rank 0 exits: rank 0 first waits some seconds for the other ranks to read the error.

The heartbeat and the watchdog threads count their own periods, not seconds. Suspending and
continuing a whole job therefore does not look like a lost rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from slowfast_lara.engine.shutdown import end_process
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import FAILED, RunError, UserError, first_line, print_error

PERIOD = 3.0  # seconds
# A lost rank is detected after 7 periods, and all ranks read the report at most 2 periods later. In
# total, this takes less than 30 s.
MISSED_BEATS = 7
STORE = "the TCP store of the run"
# After the failure of any rank, rank 0 waits at most this many periods before it exits. The other
# ranks read the error at their next beat.
READ_PERIODS = 3


class Watchdog:
    """A thread that ends this process if no call to the store returns for MISSED_BEATS periods."""

    def __init__(self, name: str) -> None:
        self._name, self._calls = name, 0
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def mark_alive(self) -> None:
        """Record that a call to the store returned."""
        self._calls += 1

    def stop(self) -> None:
        self._stopped.set()

    def end_process(self, lost: str) -> None:
        print_error(f"{self._name} exits: lost {lost}")
        end_process(FAILED)

    def _watch(self) -> None:
        last, missed = self._calls, 0
        while missed < MISSED_BEATS:
            if self._stopped.wait(PERIOD):
                return
            last, missed = self._calls, missed + 1 if self._calls == last else 0
        self.end_process(STORE)


class Heartbeat(Watchdog):
    """Ends this process when another rank or the store is lost; shares stop requests.

    The training loop also exchanges stop requests, once per batch. That is not enough, because a
    test runs no collectives, and the next training batch may never arrive.

    The constructor starts the watchdog thread; `start` starts the heartbeat thread.
    """

    def __init__(self, rank: int, world_size: int, stop: StopRequest) -> None:
        self._rank, self._peer = rank, (rank + 1) % world_size
        self._world_size = world_size
        self._failure = ""  # error of this rank, or of the first failed rank
        self._ending = False  # whether the main thread is reporting an error
        self._stop_request = stop
        self._peer_count, self._missed = 0, 0
        super().__init__(f"rank {rank}")

    def start(self, store: dist.Store, on_beat: Callable[[], None]) -> None:
        """Start the heartbeat thread, which calls `on_beat` in every period.

        `store` must not share its connection with the process group, which may block the
        connection for minutes.
        """
        self._store, self._on_beat = store, on_beat
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Mark this rank as alive while it waits for other ranks; raise Stopped after a signal."""
        self.mark_alive()
        self._stop_request.check()

    def stop(self) -> None:
        """Stop both threads; call this before the process group is destroyed."""
        super().stop()
        # Python aborts if it exits while another thread is inside PyTorch.
        self._thread.join(timeout=10)

    def share_failure(self, error: Exception) -> None:
        """Write this rank's error to the store for all ranks, unless another rank failed first.

        Rank 0 then waits for the other ranks to read the error (`_wait_for_readers`).
        """
        self._ending = True
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        text = kind + (first_line(error) if kind else str(error))
        with contextlib.suppress(RuntimeError):  # raised if the store is lost
            if self._store.add("failures", 1) == 1:
                self._store.set("failure", f"rank {self._rank} failed: {text}")
            self._know_failure(text)
            self._wait_for_readers()

    def other_failure(self) -> RunError | None:
        """The error that another rank has written to the store; None if it is unknown.

        Rank 0 first waits for the other ranks to read the error (`_wait_for_readers`).
        """
        self._ending = True
        with contextlib.suppress(RuntimeError):
            self._read_failure()
            self._wait_for_readers()
        return RunError(self._failure) if self._failure else None

    def _read_failure(self) -> None:
        if not self._failure and self._store.check(["failure"]):
            self._know_failure(self._store.get("failure").decode())

    def _know_failure(self, failure: str) -> None:
        if not self._failure:
            self._failure = failure
            self._store.add("readers", 1)

    def _wait_for_readers(self) -> None:
        """On rank 0, wait until all ranks have read the failure, at most READ_PERIODS periods.

        Rank 0 may serve the store, which closes when rank 0 exits.
        """
        deadline = time.monotonic() + READ_PERIODS * PERIOD
        while self._rank == 0 and self._failure and time.monotonic() < deadline:
            if self._store.add("readers", 0) >= self._world_size:
                break
            time.sleep(0.05)

    def _run(self) -> None:
        periods = 0  # number of periods since `_failure` was set
        while not self._stopped.wait(PERIOD):
            try:
                lost = self._beat()
            except RuntimeError:
                lost = STORE
            # In a regular shutdown, rank 0 may close the store just before this rank calls `stop`.
            if lost and self._stopped.wait(1.0):
                return
            # Usually the main thread notices the lost connection and reports the failure. In a test
            # or with NCCL it may not notice; on rank 0 it may first finish a checkpoint.
            periods += bool(self._failure)
            too_late = periods > (MISSED_BEATS if self._rank == 0 else 1)
            if self._ending:  # the main thread ends the process, or else the watchdog does
                return
            if lost or too_late:
                self.end_process(lost)

    def _beat(self) -> str:
        """Run one period of the heartbeat; return a lost rank, e.g. "rank 3", or "" if none is.

        A period increments the counter of this rank, checks the counter of the next rank, and
        shares stop requests and errors.
        """
        self._store.add(f"beats/{self._rank}", 1)
        count = self._store.add(f"beats/{self._peer}", 0)
        self._missed = self._missed + 1 if count == self._peer_count else 0
        self._peer_count = count
        if self._missed == MISSED_BEATS:
            self._store.set("lost", str(self._peer + 1))  # 0 means that no rank is lost
        lost = self._store.add("lost", 0)
        if self._store.add("stop requests", int(self._stop_request.requested)):
            self._stop_request.request("a signal to another process")
        self._read_failure()
        self._on_beat()
        self.mark_alive()
        return f"rank {lost - 1}" if lost else ""

    def end_process(self, lost: str) -> None:
        if self._failure:
            print_error(self._failure)
            end_process(FAILED)
        super().end_process(lost)
