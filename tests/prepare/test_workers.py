"""Processes that hang or crash. The imports are few: every process imports this module."""

from __future__ import annotations

import os
import signal
import time

from slowfast_lara.prepare import check
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


def decoder_that_crashes(path: str) -> str:
    """In place of `check_video`."""
    return hang_or_crash(os.path.basename(path)) and ""


def test_a_crash_of_the_decoder_is_one_bad_video(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "check_video", decoder_that_crashes)
    (tmp_path / "list.csv").write_text("a 0\ncrash 0\nb 0\n")
    out, lists = str(tmp_path / "bad.txt"), [str(tmp_path / "list.csv")]
    options = {"separator": " ", "prefix": str(tmp_path), "jobs": 2}
    assert check.check_videos(out, lists, **options) == 1
    path, reason = (tmp_path / "bad.txt").read_text().split("\t")
    assert path == str(tmp_path / "crash") and "ended with code" in reason


class Interrupting:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_destructor_is_not_lost():
    def items():
        yield 1
        Interrupting()
        yield from range(2, 10)

    handler, interrupted = signal.getsignal(signal.SIGINT), False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        list(in_processes(abs, items(), 1, 60))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        after = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, handler)
    assert interrupted and after is signal.default_int_handler
