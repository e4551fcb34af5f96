"""Fast start of Python programs: each is forked from a server that has imported PyTorch.

Imports dominate the time of a small run. A server process with one thread imports the modules
once; each program is a fork of it, with its own arguments, environment, working directory and
session, and exits like any Python program.
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
# The imports of a run; PyTorch's optimisers import torch._dynamo at their first step.
MODULES = ("slowfast_lara.engine.run", "torch._dynamo")
MAX_REQUEST_BYTES = 2**18


def environment() -> dict[str, str]:
    """Return the environment without torchrun's variables, with one thread for exact repeats."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **kept,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # PyTorch warns on stderr if there are fewer cores than workers.
        "PYTHONWARNINGS": "ignore:This DataLoader will create",
        # PyTorch logs lost peers on stderr, in addition to our line.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def start_program(command: list[str], folder: Path | None = None) -> Program:
    """Start `python COMMAND` in its own session, with `folder` as working directory."""
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
    """A running program, with the methods of subprocess.Popen that tests use."""

    def __init__(self, command: list[str], folder: Path | None) -> None:
        self.args, self.returncode = [sys.executable, *command], None
        # Packets: the pid and the exit code of a short program may arrive together.
        self._status, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        pipes = [os.pipe(), os.pipe()]
        request = {"command": command, "env": environment(), "folder": str(folder or Path.cwd())}
        given = [theirs.fileno(), *(end for _, end in pipes)]
        socket.send_fds(_server(), [json.dumps(request).encode()], given)
        for number in given:
            os.close(number)
        theirs.detach()
        self.pid = int(self._status.recv(100))
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
        """Read stdout and stderr until all writers have closed them."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for number in self._texts:
                selector.register(number, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0, deadline - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                for key, _ in ready:
                    chunk = os.read(key.fd, 2**16)
                    self._texts[key.fd] += chunk
                    if not chunk:
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
    """Start the server; it exits when this process does."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.helpers.preloaded", str(theirs.fileno())]
    given = [theirs.fileno()]
    subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=given, start_new_session=True)
    theirs.close()
    return ours


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Wait for requests; return each request in a forked process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps the intermediate processes
    while True:
        text, given, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
        if not text:
            os._exit(0)
        if os.fork():
            for number in given:
                os.close(number)
            continue
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = socket.socket(fileno=given[0])
        start = os.pipe()  # the program starts after its pid is sent
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
        status.send(str(pid).encode())
        os.close(start[0])
        os.close(start[1])
        _, ended = os.waitpid(pid, 0)
        status.send(str(os.waitstatus_to_exitcode(ended)).encode())
        os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Run the request in this process as `python COMMAND` would."""
    os.setsid()
    # A shell starts background jobs, perhaps these tests, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # cached from the environment of the server
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
    assert len(os.listdir("/proc/self/task")) == 1, "the server must have one thread to fork safely"
    gc.freeze()
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
