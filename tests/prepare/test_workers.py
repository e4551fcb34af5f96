"""Processes that hang or crash. The imports are few: every process imports this module."""

from __future__ import annotations

import os
import signal
import time

from slowfast_lara.prepare.workers import ItemFailure, in_processes


def hang_or_crash(item: str) -> str:
    if item == "hang":
        time.sleep(600)
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return item.upper()


def test_hang_or_crash_costs_one_item():
    items = ["a", "hang", "b", "crash", "c", "d"]
    results = list(in_processes(hang_or_crash, items, 2, 5))
    assert sorted(item for item, _ in results) == sorted(items)
    for item, result in results:
        if item == "hang":
            assert result == ItemFailure("took longer than 5 seconds")
        elif item == "crash":
            assert result == ItemFailure("the process ended with code -11")
        else:
            assert result == item.upper()
