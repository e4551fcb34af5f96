"""Runs of several processes on this machine: two "nodes", torchrun, and the spawning launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.preloaded import Program
from tests.helpers.runs import RUN_NET, free_port, start

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
# Starts CPU processes in the way of several GPUs: SPAWN CONFIG PORT.
SPAWN = """
import sys
from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import RankInfo, spawn
from slowfast_lara.engine.run import run
if __name__ == "__main__":
    first = RankInfo(0, 2, 0, "localhost", int(sys.argv[2]))
    sys.exit(spawn(run, load_config(sys.argv[1]), first, 2))
"""
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def start_node(
    config: Any, node: int, port: int, *extra: Any, num_shards: int = 2, **options: Any
) -> Program:
    address = f"tcp://localhost:{port}"
    flags = ("--num_shards", num_shards, "--shard_id", node, "--init_method", address)
    return start("--cfg", config, *flags, *extra, **options)


def start_nodes(
    config: Any, count: int, *, folders: Any = None, program: tuple[str, ...] = (RUN_NET,)
) -> list[Program]:
    """Start the commands of `count` nodes with one process each."""
    port = free_port()
    return [
        start_node(
            config,
            node,
            port,
            num_shards=count,
            program=program,
            folder=folders[node] if folders else None,
        )
        for node in range(count)
    ]


def start_torchrun(config: Any, count: int, *extra: Any, flags: tuple[str, ...] = ()) -> Program:
    program = (*TORCHRUN, str(count), "--master-port", str(free_port()), *flags, RUN_NET)
    return start("--cfg", config, *extra, program=program)


def start_spawning(folder: Path, config: Any) -> Program:
    script = folder / "spawn.py"
    script.write_text(SPAWN)
    return start(config, free_port(), program=(str(script),))


def descendants(pid: int) -> list[int]:
    """Return the children of a process and theirs, in order of their start."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return sorted(found)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def iterations(output: Path) -> int:
    """Count the training iterations in the log of a run."""
    log = output / "stdout.log"
    return log.read_text().count('"train_iter"') if log.exists() else 0
