"""A process for measurements that may crash, hang or leave the GPU unusable."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from slowfast_lara.user_code import import_user_code

MESSAGE_LENGTH = 300


class JobFailed(Exception):
    """A function raised an exception, ended its process, or took too long."""


class Worker:
    """Calls functions in another process; a new process replaces one that failed.

    After an illegal memory access, every later CUDA call of a process fails. So the worker
    process ends after any exception.
    """

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def call(self, function: Callable[..., Any], *args: Any, limit: float) -> Any:
        """Return function(*args); raise JobFailed if it fails or takes over `limit` seconds."""
        pipe = self._pipe or self._start()
        try:
            pipe.send((function, args))
            if not pipe.poll(limit):
                raise JobFailed(f"no result after {limit:g} s")
            result, problem = pipe.recv()
        except (EOFError, OSError):
            raise JobFailed(self._ending()) from None
        except BaseException:  # also KeyboardInterrupt
            self._stop()
            raise
        if problem:
            self._stop()
            raise JobFailed(problem)
        return result

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        # Ctrl-C in a terminal sends SIGINT to both processes. The worker inherits SIG_IGN.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()
        return self._pipe

    def _ending(self) -> str:
        """Description of how the process ended on its own."""
        assert self._process is not None
        self._process.join(10)
        code = self._process.exitcode
        self._stop()
        if code is not None and code < 0:
            return f"the process was killed by signal {-code}"
        return (
            "the process closed its connection"
            if code is None
            else f"the process ended with exit code {code}"
        )

    def _stop(self) -> None:
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection) -> None:
    """In the worker: call the functions that arrive through the pipe, until the pipe is closed."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    import_user_code()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (function(*args), "")
        except Exception as error:
            # Keep all lines: the first line of a torch.compile error does not have the reason.
            message = " ".join(f"{type(error).__name__}: {error}".split())
            answer = (None, message[:MESSAGE_LENGTH])
        pipe.send(answer)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
