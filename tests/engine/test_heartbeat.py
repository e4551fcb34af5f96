"""Suspended and disconnected ranks are detected by all others.

The processes idle, as in a long test, with a short heartbeat period; a slow test uses the default.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.helpers.isolation import ip, linked_namespaces, why_no_network_namespaces
from tests.helpers.runs import finish, free_port, start, wait_for, write_config

IDLE = """
import pathlib, sys, time
from slowfast_lara.config import load_config
from slowfast_lara.engine import heartbeat
from slowfast_lara.engine.launch import RankInfo, run_process

config, rank, world_size, host, port, folder, period = sys.argv[1:]
heartbeat.PERIOD = float(period)
folder = pathlib.Path(folder)

def run(cfg, stop):
    (folder / f"running{rank}").touch()
    while not (folder / "stop").exists():
        time.sleep(0.1)

info = RankInfo(int(rank), int(world_size), 0, host, int(port))
sys.exit(run_process(run, load_config(config), info))
"""
EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


def start_idle(folder, count, *, host="localhost", period=0.2, prefix=None):
    """Start `count` ranks and wait until they run; `prefix(rank)` starts their commands."""
    config = write_config(folder / "c.yaml", folder, folder / "out")
    script = folder / "idle.py"
    script.write_text(IDLE)
    port = free_port()
    processes = []
    for rank in range(count):
        arguments = (script, config, rank, count, host, port, folder, period)
        if prefix is None:
            processes.append(start(*arguments[1:], program=(str(script),)))
        else:
            command = (*prefix(rank), sys.executable, *arguments)
            processes.append(start(*command, program=("-c", EXEC)))

    def running() -> bool:
        assert all(process.poll() is None for process in processes), finish(processes[0])
        return all((folder / f"running{rank}").exists() for rank in range(count))

    wait_for(running, seconds=120)
    return processes


@pytest.mark.slow
def test_a_rank_waits_for_the_store(tmp_path):
    """Longer than the watchdog waits for a call to the store."""

    def prefix(rank: int) -> tuple[str, ...]:
        return ("sh", "-c", 'sleep 4 && exec "$@"', "sh") if rank == 0 else ("env",)

    processes = start_idle(tmp_path, 2, prefix=prefix)
    (tmp_path / "stop").touch()
    assert [finish(process)[0] for process in processes] == [0, 0]


def assert_detects_loss(process, seconds=60):
    code, _, stderr = finish(process, seconds)
    assert code == 1 and "lost" in stderr.splitlines()[-1], stderr


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_ranks_detect_a_suspended_one(tmp_path, victim):
    """Rank 0 serves the store: while it is suspended, no call to the store returns."""
    processes = start_idle(tmp_path, 3)
    os.kill(processes[victim].pid, signal.SIGSTOP)
    for process in processes:
        if process is not processes[victim]:
            assert_detects_loss(process)


def test_a_job_suspended_as_a_whole_continues(tmp_path):
    processes = start_idle(tmp_path, 2)
    for number, seconds in ((signal.SIGSTOP, 3), (signal.SIGCONT, 2.5)):
        for process in processes:
            os.kill(process.pid, number)
        time.sleep(seconds)  # longer than the heartbeat waits for a lost rank
    (tmp_path / "stop").touch()
    assert [finish(process)[0] for process in processes] == [0, 0]


@pytest.mark.slow
def test_a_loss_is_detected_with_the_default_period(tmp_path):
    from slowfast_lara.engine import heartbeat

    processes = start_idle(tmp_path, 3, period=heartbeat.PERIOD)
    os.kill(processes[0].pid, signal.SIGSTOP)
    for process in processes[1:]:
        assert_detects_loss(process)


# A cut link between two network namespaces


@pytest.fixture()
def link():
    reason = why_no_network_namespaces()
    if reason:
        pytest.skip(reason)
    with linked_namespaces() as names:
        yield names


@pytest.mark.slow
def test_both_sides_detect_a_cut_link(tmp_path, link):
    """Rank 0, with the store, on one side; ranks 1 and 2 on the other."""

    def prefix(rank: int) -> tuple[str, ...]:
        name = link[min(rank, 1)]
        return ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name}")

    processes = start_idle(tmp_path, 3, host="10.213.77.1", prefix=prefix)
    ip("-n", link[0], "link", "set", link[0], "down")
    for process in processes:
        assert_detects_loss(process)
