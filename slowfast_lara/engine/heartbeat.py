"""Noticing within about half a minute that another process of the run is gone.

A collective fails when a peer dies, but evaluation has none for a long time, and
a machine that loses power closes no connection. So each process counts up in
the run's key-value store, watches the next one's count, and tells all of a death.
"""

from __future__ import annotations

import datetime
import os
import threading

import torch.distributed as dist

from slowfast_lara.engine.failures import end_process
from slowfast_lara.errors import FAILED, complain

PERIOD = 5.0
# Counted in beats, not in time: a job that is suspended as a whole loses nobody.
MISSED_BEATS = 6


class Heartbeat(threading.Thread):
    """Ends this process when another one is lost; `stop` it before leaving."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._rank, self._peer = dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()
        # A connection of its own: the process group's may be busy for minutes.
        store = dist.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=PERIOD * MISSED_BEATS),
        )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"heartbeat/{restart}", store)
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        last, missed = 0, 0
        while not self._stopped.wait(PERIOD):
            try:
                self._store.add(f"{self._rank}", 1)
                count = self._store.add(f"{self._peer}", 0)
                lost = self._store.get("lost").decode() if self._store.check(["lost"]) else ""
                missed, last = (missed + 1, last) if count == last else (0, count)
                if missed == MISSED_BEATS and not lost:
                    lost = f"process {self._peer}"
                    self._store.set("lost", lost)
            except RuntimeError:
                lost = "the process that keeps the run's store, or the way to it,"
            # At a regular end, the store's keeper may be the first to leave.
            if lost and not self._stopped.wait(1.0):
                complain(f"{lost} of this run is gone, so process {self._rank} ends")
                end_process(FAILED)
