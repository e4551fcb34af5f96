"""Processes that hang or crash. Nothing slow is imported: each process loads this file."""

from __future__ import annotations

import os
import signal
import time

from slowfast_lara.prepare.workers import Lost, in_processes


def strange_work(item: str) -> str:
    if item == "hang":
        time.sleep(600)
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return item.upper()


def test_hangs_and_crashes_cost_one_item():
    items = ["a", "hang", "b", "crash", "c", "d"]
    results = list(in_processes(strange_work, items, 2, 5))
    assert sorted(item for item, _ in results) == sorted(items)
    for item, result in results:
        if item == "hang":
            assert result == Lost("took longer than 5 seconds")
        elif item == "crash":
            assert result == Lost("the process ended with code -11")
        else:
            assert result == item.upper()
