"""Work on many files by processes: none may hang, and a crash costs one file only."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lost(NamedTuple):
    """In place of a result: what became of the process."""

    reason: str


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], processes: int, time_limit: float
) -> Generator[tuple[Item, Result | Lost], None, None]:
    """Each item with its result, in the order in which they are done.

    To close the iterator ends all processes at once; so does the end of this process,
    however it comes.
    """
    left = iter(items)
    workers: list[_Worker[Item, Result]] = []
    try:
        for item in _take(left, processes):
            workers.append(_Worker(work, time_limit))
            workers[-1].start(item)
        while workers:
            soonest = min(worker.deadline for worker in workers)
            connections = [worker.connection for worker in workers]
            answered = wait(connections, max(soonest - time.monotonic(), 0))
            for worker in list(workers):
                if worker.connection in answered or time.monotonic() > worker.deadline:
                    item, result = worker.finish(worker.connection in answered)
                    for following in _take(left, 1):
                        worker.start(following)
                        break
                    else:
                        workers.remove(worker)
                        worker.end()
                    yield item, result
    finally:
        for worker in workers:
            worker.end()


def _take(items: Iterator[Item], count: int) -> Iterator[Item]:
    for _, item in zip(range(count), items):
        yield item


class _Worker(Generic[Item, Result]):
    """A process that works on one item after the other; a new one if it is lost."""

    def __init__(self, work: Callable[[Item], Result], time_limit: float) -> None:
        self._work, self._time_limit = work, time_limit
        self._start_process()

    def _start_process(self) -> None:
        # Of a functools.partial, the function's own module.
        context = _context(getattr(self._work, "func", self._work).__module__)
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._work, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, item: Item) -> None:
        self._item, self.deadline = item, time.monotonic() + self._time_limit
        with contextlib.suppress(BrokenPipeError):  # it is gone; `finish` will say so
            self.connection.send(item)

    def finish(self, has_answered: bool) -> tuple[Item, Result | Lost]:
        """The item and its result; has it not answered, then its time is over."""
        try:
            if has_answered:
                return self._item, self.connection.recv()
            reason = f"took longer than {self._time_limit:g} seconds"
        except (EOFError, ConnectionResetError):
            self._process.join()
            reason = f"the process ended with code {self._process.exitcode}"
        self.end()
        self._start_process()
        return self._item, Lost(reason)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _context(module: str) -> Any:
    """Processes from a server that has the module loaded already, where there is one.

    A fork of this process would hold the others' connections, and the locks of its
    threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def _serve(work: Callable[[Any], Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send(work(item))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
