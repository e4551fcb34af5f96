"""Parallel map with one process per item: a crash or a timeout affects only that item."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class ItemFailure(NamedTuple):
    """The reason why an item has no result."""

    reason: str


class _RunningItem(NamedTuple):
    item: Any
    process: Any
    deadline: float


def in_processes(
    work: Callable[[Item], Result], items: Iterable[Item], processes: int, time_limit: float
) -> Generator[tuple[Item, Result | ItemFailure], None, None]:
    """Run `work` on every item, each in its own process, and yield results as they finish.

    Args:
        work: a module-level function, or a partial of one.
        processes: maximum number of concurrent processes.
        time_limit: seconds after which the process of an item is killed.

    All processes end when the iterator is closed or the calling process dies.
    """
    context = process_context(getattr(work, "func", work).__module__)
    waiting = iter(items)
    running: dict[Connection, _RunningItem] = {}
    with _recorded_interrupts() as interrupted:
        try:
            while True:
                for item in itertools.islice(waiting, processes - len(running)):
                    connection, other_end = context.Pipe()
                    process = context.Process(target=_run, args=(work, other_end), daemon=True)
                    process.start()
                    other_end.close()
                    running[connection] = _RunningItem(item, process, time.monotonic() + time_limit)
                    # Send the item only now: Ctrl-C kills only the processes in `running`, so a
                    # process must not start its work before it is in `running`.
                    with contextlib.suppress(BrokenPipeError):  # `_receive` reports a dead process
                        connection.send(item)
                if not running:
                    return
                next_deadline = min(entry.deadline for entry in running.values())
                ready = wait(list(running), max(next_deadline - time.monotonic(), 0))
                if interrupted:
                    raise KeyboardInterrupt
                for connection, entry in list(running.items()):
                    result: Result | ItemFailure
                    if connection in ready:
                        result = _receive(connection, entry.process)
                    elif time.monotonic() > entry.deadline:
                        result = ItemFailure(f"took longer than {time_limit:g} seconds")
                    else:
                        continue
                    _kill(connection, running.pop(connection))
                    yield entry.item, result
        finally:
            for connection, entry in running.items():
                _kill(connection, entry)


@contextlib.contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Record every Ctrl-C: Python drops a KeyboardInterrupt that is raised in a destructor."""
    received: list[int] = []

    def record(number: int, _frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield received
        return
    signal.signal(signal.SIGINT, record)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _receive(connection: Connection, process: Any) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return ItemFailure(f"the process ended with code {process.exitcode}")


def _kill(connection: Connection, entry: _RunningItem) -> None:
    entry.process.kill()
    entry.process.join()
    connection.close()


def process_context(module: str) -> Any:
    """Forkserver context with `module` preloaded, or spawn context where forkserver is missing.

    The start method fork would copy open connections, and locks that other threads hold.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def _run(work: Callable[[Any], Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: the parent kills this process
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError):  # EOF: the parent process has exited
        connection.send(work(connection.recv()))


def _exit_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
