"""Launcher: starts the processes of a run on this node and returns their exit code.

- Under `torchrun`, this process is one of the ranks that torchrun has started.
- On a single node with at most one GPU, this process performs the whole run.
- Otherwise the user starts the command once on each of the NUM_SHARDS nodes, as with PySlowFast,
  and the command runs one rank per GPU of its node (without GPUs, one rank).

PySlowFast's launcher needs CUDA even to run on a CPU, waits without a timeout for missing
nodes, and leaves the other processes running when one of them fails.
"""

from __future__ import annotations

import atexit
import datetime
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

from slowfast_lara.config import check_machine, load_config
from slowfast_lara.engine.fingerprint import run_fingerprint
from slowfast_lara.engine.heartbeat import Heartbeat
from slowfast_lara.engine.rendezvous import RankInfo, join_run
from slowfast_lara.engine.shutdown import end_process, friendly_errors
from slowfast_lara.engine.signals import StopRequest, ignore_signals
from slowfast_lara.errors import (
    DONE,
    FAILED,
    LAUNCH_DIR,
    ConfigError,
    InputError,
    RunError,
    UserError,
    first_line,
    print_error,
    run_with_exit_code,
)
from slowfast_lara.user_code import import_user_code

RunFunction = Callable[[CfgNode, StopRequest], None]

DEFAULT_INIT_METHOD = "tcp://localhost:9999"
RENDEZVOUS_SECONDS = 300
# After one process has failed, the other processes have this long to exit; then they are killed.
GRACE_SECONDS = 30
# torchrun sets these variables in every process that it starts.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    return all(name in os.environ for name in _TORCHRUN)


def prepare(cfg_file: str, opts: Sequence[Any], init_method: str | None) -> CfgNode:
    """Load the config of a run and check that this command can run it on this machine."""
    cfg = load_config(cfg_file, opts)
    has_node_flags = init_method is not None or "SHARD_ID" in opts or "NUM_SHARDS" in opts
    if under_torchrun():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        node = int(os.environ["RANK"]) // local
        counts = ["NUM_SHARDS", world // local, "SHARD_ID", node]
        counts += ["NUM_GPUS", local] if cfg.NUM_GPUS > 0 else []
        cfg = load_config(cfg_file, [*opts, *counts])
    elif cfg.NUM_SHARDS > 1 and cfg.SHARD_ID == 0 and not has_node_flags:
        # Without --init_method, this process would wait for nodes that do not know its address.
        raise ConfigError(
            f"NUM_SHARDS is {cfg.NUM_SHARDS} in {cfg_file}; run this command on each of the "
            f"{cfg.NUM_SHARDS} nodes with --shard_id I --init_method tcp://HOST:PORT, or set "
            "NUM_SHARDS 1 to run on this node only"
        )
    check_machine(cfg)
    return cfg


def launch(run: RunFunction, cfg: CfgNode, init_method: str | None = None) -> int:
    """Call `run` in each process of this command; return the exit code of the command."""
    if under_torchrun():
        rank, world_size, local_rank = (int(os.environ[name]) for name in _TORCHRUN[:3])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return run_process(run, cfg, RankInfo(rank, world_size, local_rank, host, port))
    per_node = max(1, cfg.NUM_GPUS)
    if per_node * cfg.NUM_SHARDS == 1:
        return run_process(run, cfg)
    if init_method is None and cfg.NUM_SHARDS == 1:
        host, port = "localhost", _free_port()
    else:
        host, port = _parse_address(init_method or DEFAULT_INIT_METHOD)
    info = RankInfo(cfg.SHARD_ID * per_node, per_node * cfg.NUM_SHARDS, 0, host, port)
    if per_node == 1:
        return run_process(run, cfg, info)
    return spawn(run, cfg, info, per_node)


def _parse_address(init_method: str) -> tuple[str, int]:
    try:
        address = urlsplit(init_method)
        if address.scheme == "tcp" and address.hostname and address.port:
            return address.hostname, address.port
    except ValueError:  # the port is not a number below 65536
        pass
    raise InputError(f"--init_method is {init_method!r}; must be tcp://HOST:PORT")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def spawn(run: RunFunction, cfg: CfgNode, first: RankInfo, processes: int) -> int:
    """Start the processes of this node, wait for them, and return the exit code.

    `first` describes the first rank of this node.
    """
    context = multiprocessing.get_context("spawn")
    start_method = multiprocessing.get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        infos = [replace(first, rank=first.rank + i, local_rank=i) for i in range(processes)]
        children = [
            context.Process(target=_run_child, args=(run, cfg, info, start_method, folder))
            for info in infos
        ]
        for child in children:
            child.start()

        def forward_signal() -> None:
            for child in children:
                child.terminate()

        StopRequest().listen(forward_signal)
        code = _wait_for(children)
    atexit.register(ignore_signals)
    return code


def _wait_for(children: Sequence[BaseProcess]) -> int:
    """Wait for all children; return the exit code of the first that fails, or DONE.

    GRACE_SECONDS after the first failure, the children that still run are killed.
    """
    code: int = DONE
    deadline: float | None = None
    alive = list(children)
    while alive:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        wait([child.sentinel for child in alive], timeout=timeout)
        for child in [child for child in alive if not child.is_alive()]:
            alive.remove(child)
            if child.exitcode and code == DONE:
                code, deadline = child.exitcode, time.monotonic() + GRACE_SECONDS
                if code < 0:
                    name = signal.Signals(-code).name
                    print_error(f"local rank {children.index(child)} was killed by {name}")
                    code = FAILED
        if deadline is not None and time.monotonic() >= deadline:
            for child in alive:
                child.kill()
    return code


def _run_child(
    run: RunFunction, cfg: CfgNode, info: RankInfo, start_method: str, folder: str
) -> None:
    os.environ[LAUNCH_DIR] = folder
    # In a spawned process, the default start method is "spawn". Restore the launcher's default,
    # which DataLoader workers then use.
    multiprocessing.set_start_method(start_method, force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(run_with_exit_code(import_user_code) or run_process(run, cfg, info))


def _end_with_parent() -> None:
    """Wait until the launcher exits, then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        end_process(FAILED)


def run_process(run: RunFunction, cfg: CfgNode, info: RankInfo | None = None) -> int:
    """Call `run` in this process; return the exit code.

    `info` describes this rank; it is None if the run has a single process. If `run` fails and the
    run has several ranks, or DataLoader workers are alive, the process exits without returning.
    """
    stop = StopRequest().listen()
    errors = []

    @friendly_errors()
    def work() -> None:
        try:
            if info is None:
                run(cfg, stop)
            else:
                _run_rank(run, cfg, info, stop)
        except BaseException as error:
            # The reference to the traceback keeps the DataLoaders alive: their destructors would
            # wait ten seconds for each worker that hangs.
            errors.append(error)
            raise

    code = run_with_exit_code(work, os_error=FAILED)
    if code != DONE and (info is not None or multiprocessing.active_children()):
        end_process(code)
    # At exit, Python would wait for hanging workers without handling signals.
    for worker in multiprocessing.active_children():
        worker.kill()
    atexit.register(ignore_signals)
    return code


def _run_rank(run: RunFunction, cfg: CfgNode, info: RankInfo, stop: StopRequest) -> None:
    heartbeat = _init_process_group(cfg, info, stop)
    run(cfg, stop)
    dist.barrier()
    heartbeat.stop()
    dist.destroy_process_group()


def _init_process_group(cfg: CfgNode, info: RankInfo, stop: StopRequest) -> Heartbeat:
    backend = "gloo"
    if cfg.NUM_GPUS > 0:
        torch.cuda.set_device(info.local_rank)
        backend = f"cpu:gloo,cuda:{cfg.DIST_BACKEND}"
    timeout = min(cfg.DIST_TIMEOUT, RENDEZVOUS_SECONDS)
    fingerprint = run_fingerprint(cfg, info.world_size)
    heartbeat = Heartbeat(info.rank, info.world_size, stop)
    try:
        dist.init_process_group(
            backend,
            store=join_run(fingerprint, info, timeout, heartbeat),
            rank=info.rank,
            world_size=info.world_size,
            timeout=datetime.timedelta(seconds=cfg.DIST_TIMEOUT),
        )
    except UserError:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RunError(
            f"rank {info.rank} of {info.world_size}: rendezvous at {info.host}:{info.port} failed "
            f"(timeout {timeout} s): {first_line(error)}"
        ) from None
    return heartbeat
