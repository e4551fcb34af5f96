"""Start of runs with all launchers, and search for their processes, including orphans."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launchers import SPAWN, TORCHRUN
from tests.helpers.preloaded import environment
from tests.helpers.runs import RUN_NET, free_port

MARK = "SLOWFAST_LARA_TORTURE"
_OUR_MARK = f"{MARK}={os.getpid()}-"
_numbers = itertools.count()


@dataclass
class StartedRun:
    """The processes of one run; `mains` are those started here."""

    launch: str
    mark: str
    mains: list[subprocess.Popen]
    stderr: list[Path]
    restarts: bool = False  # whether its launchers restart failed ranks

    def all_pids(self) -> list[int]:
        return _marked(self.mark)

    def ranks(self) -> list[int]:
        """Return the ranks, in order of their start."""
        if self.launch in ("alone", "nodes") and not self.restarts:
            return [main.pid for main in self.mains if main.poll() is None]
        word = "run_net" if self.launch == "torchrun" else "spawn_main"
        mains = [main.pid for main in self.mains]
        return sorted(
            pid for pid in self.all_pids() if _parent(pid) in mains and word in _command_line(pid)
        )

    def workers(self) -> list[int]:
        """Return the DataLoader workers: forks with the command line of their parent."""
        ranks = {pid: _command_line(pid) for pid in self.ranks()}
        return sorted(
            pid
            for pid in self.all_pids()
            if _parent(pid) in ranks and _command_line(pid) == ranks[_parent(pid)]
        )

    def alive(self) -> bool:
        return any(main.poll() is None for main in self.mains)

    def wait(self, seconds: float) -> list[int | None]:
        """Return the exit codes of `mains`, None for one that is still running."""
        deadline = time.monotonic() + seconds
        for main in self.mains:
            with contextlib.suppress(subprocess.TimeoutExpired):
                main.wait(max(0.0, deadline - time.monotonic()))
        return [main.returncode for main in self.mains]

    def stderr_texts(self) -> list[str]:
        return [path.read_text(errors="replace") for path in self.stderr]

    def kill_all(self) -> None:
        send(self.all_pids(), signal.SIGKILL)
        for main in self.mains:
            main.wait()


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def suspend(pids: Sequence[int]) -> None:
    """Send SIGSTOP and wait until the processes have stopped: a write in progress ends first."""
    send(pids, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(_state(pid) in ("R", "S", "D") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)


def kill_all_started() -> None:
    send([pid for pid in _pids() if _OUR_MARK in _environment_of(pid)], signal.SIGKILL)


def start(
    launch: str,
    folder: Path,
    config: Path,
    *arguments: object,
    prefix: Callable[[int], Sequence[str]] = lambda node: (),
    by_node: Callable[[int], Sequence[object]] = lambda node: (),
    host: str = "localhost",
    limits: dict[int, int] | None = None,
    stdout: int = subprocess.DEVNULL,
) -> StartedRun:
    """Start a run with the launcher "alone", "nodes" (two), "torchrun" or "spawn".

    `prefix(node)` starts the command of a node, `by_node(node)` are further arguments.
    """
    mark = f"{os.getpid()}-{next(_numbers)}"
    port = free_port()
    started = StartedRun(launch, mark, [], [])
    for node in range(2 if launch == "nodes" else 1):
        words = [*arguments, *by_node(node)]
        if launch == "torchrun":
            program = [*TORCHRUN, 2, "--master-port", port, RUN_NET, "--cfg", config, *words]
        elif launch == "spawn":
            script = folder / "spawn.py"
            script.write_text(SPAWN)
            program = [script, config, port]
        else:
            program = [RUN_NET, "--cfg", config, *words]
        if launch == "nodes":
            address = f"tcp://{host}:{port}"
            program += ["--num_shards", 2, "--shard_id", node, "--init_method", address]
        command = [*prefix(node), sys.executable, *map(str, program)]
        path = folder / f"stderr{mark.replace('-', '_')}_{node}.txt"
        with path.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                # PyTorch warns of many workers and of DDP's strides in undisturbed runs, too.
                # The handler of SIGABRT prints the Python stacks of a hanging process.
                env={
                    **environment(),
                    MARK: mark,
                    "PYTHONWARNINGS": "ignore",
                    "PYTHONFAULTHANDLER": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=None if limits is None else lambda: _limit(limits),
            )
        started.mains.append(process)
        started.stderr.append(path)
    return started


def _limit(limits: dict[int, int]) -> None:
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _marked(mark: str) -> list[int]:
    return sorted(pid for pid in _pids() if f"{MARK}={mark}\0" in _environment_of(pid))


def _environment_of(pid: int) -> str:
    return _read(pid, "environ")  # empty for a zombie


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline")


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """Return state, parent and the following fields of /proc/PID/stat."""
    return _read(pid, "stat").rpartition(")")[2].split() or ["", "0"]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:  # the process has exited
        return ""
