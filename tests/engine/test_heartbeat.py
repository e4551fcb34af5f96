"""A process that is stopped, or cut off from the others, is noticed by all of them.

Real processes that do nothing together, as in a long test, with a heartbeat that
beats faster than usual; the slow test has the usual one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.helpers.runs import finish, free_port, start, wait_for, write_config

IDLE = """
import pathlib, sys, time
from slowfast_lara.config import load_config
from slowfast_lara.engine import heartbeat
from slowfast_lara.engine.launch import Place, _run_in_place

config, rank, world_size, address, folder, period = sys.argv[1:]
heartbeat.PERIOD = float(period)
folder = pathlib.Path(folder)

def run(cfg, stop):
    (folder / f"running{rank}").touch()
    while not (folder / "enough").exists():
        time.sleep(0.1)

sys.exit(_run_in_place(run, load_config(config), Place(int(rank), int(world_size), 0, address)))
"""
LOST = "is gone, so process"
EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


def start_idle(folder, count, address, *, period=0.5, inside=lambda rank: ()):
    """`count` processes that have met; `inside` gives what their commands begin with."""
    config = write_config(folder / "c.yaml", folder, folder / "out")
    script = folder / "idle.py"
    script.write_text(IDLE)
    processes = [
        start(
            *inside(rank),
            *(sys.executable, script, config, rank, count, address, folder, period),
            program=("-c", EXEC),
        )
        for rank in range(count)
    ]

    def running() -> bool:
        assert all(process.poll() is None for process in processes), finish(processes[0])
        return all((folder / f"running{rank}").exists() for rank in range(count))

    wait_for(running, seconds=120)
    return processes


def assert_notices(process, seconds=60):
    code, _, stderr = finish(process, seconds)
    assert code == 1 and LOST in stderr.splitlines()[-1], stderr


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_process_is_noticed_by_all(tmp_path, victim):
    """Process 0 keeps the store: when it is stopped, no call to the store comes back."""
    processes = start_idle(tmp_path, 3, f"tcp://localhost:{free_port()}")
    os.kill(processes[victim].pid, signal.SIGSTOP)
    for process in processes:
        if process is not processes[victim]:
            assert_notices(process)


def test_a_job_that_is_suspended_as_a_whole_loses_nobody(tmp_path):
    processes = start_idle(tmp_path, 2, f"tcp://localhost:{free_port()}")
    for number, seconds in ((signal.SIGSTOP, 6), (signal.SIGCONT, 5)):
        for process in processes:
            os.kill(process.pid, number)
        time.sleep(seconds)  # more than the heartbeat would wait for one that is lost
    (tmp_path / "enough").touch()
    assert [finish(process)[0] for process in processes] == [0, 0]


@pytest.mark.slow
def test_half_a_minute(tmp_path):
    """With the period that runs have."""
    from slowfast_lara.engine import heartbeat

    address = f"tcp://localhost:{free_port()}"
    processes = start_idle(tmp_path, 3, address, period=heartbeat.PERIOD)
    os.kill(processes[0].pid, signal.SIGSTOP)
    for process in processes[1:]:
        assert_notices(process)


# A cut link, between two network namespaces.

_numbers = itertools.count()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_no_namespaces() -> str:
    if not sys.platform.startswith("linux") or not shutil.which("ip"):
        return "needs Linux and iproute2"
    name = f"lara-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces: {error.stderr.strip()}"
    return ""


@contextlib.contextmanager
def linked_namespaces() -> Iterator[list[str]]:
    """Two namespaces, joined by one link: their names, which are also the devices'."""
    number = next(_numbers)
    names = [f"lara{os.getpid()}{side}{number}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        peer = ("peer", "name", names[1], "netns", names[1])
        ip("link", "add", names[0], "netns", names[0], "type", "veth", *peer)
        for address, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.213.77.{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture()
def link():
    reason = why_no_namespaces()
    if reason:
        pytest.skip(reason)
    with linked_namespaces() as names:
        yield names


@pytest.mark.slow
def test_a_cut_link_is_noticed_on_both_sides(tmp_path, link):
    """Process 0, with the store, on one machine; processes 1 and 2 on another."""

    def inside(rank: int) -> tuple[str, ...]:
        name = link[min(rank, 1)]
        return ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name}")

    address = f"tcp://10.213.77.1:{free_port()}"
    processes = start_idle(tmp_path, 3, address, inside=inside)
    ip("-n", link[0], "link", "set", link[0], "down")
    for process in processes:
        assert_notices(process)
