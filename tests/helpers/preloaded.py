"""Programs that start at once: each is forked from a process that has imported PyTorch.

Most of a small run is its imports. Here they are made once, in a process that does nothing else
and has one thread; a program is a fork of it, with arguments, environment, folder and session of
its own, and ends as any Python program ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# What a run imports; torch._dynamo is what PyTorch's optimisers import at their first step.
MODULES = ("slowfast_lara.engine.run", "torch._dynamo")
MOST_BYTES = 2**18


def environment() -> dict[str, str]:
    """Without a torchrun around the tests, and one thread each: bits must repeat."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **kept,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # What PyTorch says on stderr where there are fewer cores than workers.
        "PYTHONWARNINGS": "ignore:This DataLoader will create",
        # What PyTorch has to say of a peer that has gone, beside our line.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def start_program(command: list[str], folder: Path | None = None) -> Program:
    """`python COMMAND` in a session of its own, and in `folder`."""
    if sys.platform == "linux":
        return Program(command, folder)
    return subprocess.Popen(  # type: ignore[return-value]
        [sys.executable, *command],
        text=True,
        env=environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


class Program:
    """A program that is running: what tests use of subprocess.Popen."""

    def __init__(self, command: list[str], folder: Path | None) -> None:
        self.args, self.returncode = [sys.executable, *command], None
        self._status, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        request = {"command": command, "env": environment(), "folder": str(folder or Path.cwd())}
        given = [theirs.fileno(), *(end for _, end in pipes)]
        socket.send_fds(_server(), [json.dumps(request).encode()], given)
        for number in given:
            os.close(number)
        theirs.detach()
        self.pid = int(self._status.makefile().readline())
        self.stdout, self.stderr = (os.fdopen(start) for start, _ in pipes)
        self._texts: dict[int, bytes] = {self.stdout.fileno(): b"", self.stderr.fileno(): b""}

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(100))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Stdout and stderr, up to the end of all who write to them."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for number in self._texts:
                selector.register(number, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0, deadline - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                for key, _ in ready:
                    some = os.read(key.fd, 2**16)
                    self._texts[key.fd] += some
                    if not some:
                        selector.unregister(key.fd)
        self.wait(max(0.1, deadline - time.monotonic()))
        stdout, stderr = (text.decode() for text in self._texts.values())
        return stdout, stderr

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> socket.socket:
    """The process that imports once; it ends when this one does."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.helpers.preloaded", str(theirs.fileno())]
    given = [theirs.fileno()]
    subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=given, start_new_session=True)
    theirs.close()
    return ours


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Waits for requests; returns in the program that was asked for, with the request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those that wait have ended
    while True:
        text, given, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not text:
            os._exit(0)
        if os.fork():
            for number in given:
                os.close(number)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = socket.socket(fileno=given[0])
        start = os.pipe()  # it begins when its number has been told
        pid = os.fork()
        if pid == 0:
            os.close(start[1])
            os.read(start[0], 1)
            os.close(start[0])
            status.close()
            for standard, number in enumerate(given[1:], start=1):
                os.dup2(number, standard)
                os.close(number)
            return json.loads(text)
        for number in given[1:]:
            os.close(number)
        status.send(f"{pid}\n".encode())
        os.close(start[0])
        os.close(start[1])
        _, ended = os.waitpid(pid, 0)
        status.send(str(os.waitstatus_to_exitcode(ended)).encode())
        os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Do what `python COMMAND` does."""
    os.setsid()
    # What a shell runs in the background, these tests perhaps, ignores it, and so would we.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # known from another environment
    program, *arguments = sys.argv = request["command"]
    sys.path[0] = os.getcwd()
    if program == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[0], vars(sys.modules["__main__"]))
    elif program == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "only a process of one thread can be forked"
    gc.freeze()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
