"""From one command to all the processes of a run.

One process; NUM_GPUS processes of each of NUM_SHARDS machines, PySlowFast's way;
or the processes that `torchrun` has started. PySlowFast's own launcher calls
CUDA without asking, waits without a limit, and leaves ranks behind.
"""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

from slowfast_lara.config import check_machine, load_config
from slowfast_lara.engine.failures import end_process, plain_reasons
from slowfast_lara.engine.heartbeat import Heartbeat
from slowfast_lara.engine.meeting import meet
from slowfast_lara.engine.signals import SIGNALS, StopRequest
from slowfast_lara.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    ConfigError,
    InputError,
    RunError,
    UserError,
    complain,
    exit_code_of,
    first_line,
)

logger = logging.getLogger(__name__)

Run = Callable[[CfgNode, StopRequest], None]

DEFAULT_INIT_METHOD = "tcp://localhost:9999"
# A run's processes start together; one that is not there by then never comes.
RENDEZVOUS_SECONDS = 300
# What the others get to end by themselves when one has failed.
GRACE_SECONDS = 30
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One process's place in a run of several."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str


def under_torchrun() -> bool:
    return all(name in os.environ for name in _TORCHRUN)


def prepare(cfg_file: str, opts: Sequence[Any], init_method: str | None) -> CfgNode:
    """The config of a run on this machine, refused if this command cannot run it."""
    cfg = _settle(load_config(cfg_file, opts))
    told = init_method is not None or "SHARD_ID" in opts or "NUM_SHARDS" in opts
    if cfg.NUM_SHARDS > 1 and cfg.SHARD_ID == 0 and not told and not under_torchrun():
        # It would wait for machines that nobody has told of.
        raise ConfigError(
            f"NUM_SHARDS is {cfg.NUM_SHARDS} in {cfg_file}; on each of so many machines "
            "--shard_id I --init_method tcp://HOST:PORT is expected, or NUM_SHARDS 1 for this "
            "one alone"
        )
    check_machine(cfg)
    return cfg


def _settle(cfg: CfgNode) -> CfgNode:
    """The config with the numbers of processes that torchrun has started, if it has."""
    if not under_torchrun():
        return cfg
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cfg = cfg.clone()
    cfg.defrost()
    cfg.NUM_SHARDS, cfg.SHARD_ID = world // local, int(os.environ["RANK"]) // local
    if cfg.NUM_GPUS > 0:
        cfg.NUM_GPUS = local
    cfg.freeze()
    return cfg


def launch(run: Run, cfg: CfgNode, init_method: str | None = None) -> int:
    """Run on all the processes that this command stands for; the exit code."""
    per_node = max(1, cfg.NUM_GPUS)
    if under_torchrun():
        place = Place(
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            int(os.environ["LOCAL_RANK"]),
            "env://",
        )
        return _run_in_place(run, cfg, place)
    if per_node * cfg.NUM_SHARDS == 1:
        return _run_alone(run, cfg)
    if init_method is None and cfg.NUM_SHARDS == 1:
        init_method = f"tcp://localhost:{_free_port()}"
    place = Place(
        cfg.SHARD_ID * per_node, per_node * cfg.NUM_SHARDS, 0, init_method or DEFAULT_INIT_METHOD
    )
    asked = urlsplit(place.init_method)
    if asked.scheme != "tcp" or not asked.hostname or not _port(place.init_method):
        raise InputError(f"--init_method is {place.init_method!r}; tcp://HOST:PORT is expected")
    if per_node == 1:
        return _run_in_place(run, cfg, place)
    return spawn(run, cfg, place, per_node)


def spawn(run: Run, cfg: CfgNode, first: Place, processes: int) -> int:
    """Run `processes` processes of this machine, the first of them in place `first`."""
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(
            target=_run_as_child,
            args=(
                run,
                cfg,
                replace(first, rank=first.rank + i, local_rank=i),
                multiprocessing.get_start_method(),
            ),
        )
        for i in range(processes)
    ]
    for child in children:
        child.start()

    def forward(_number: int, _frame: Any) -> None:
        for child in children:
            if child.is_alive():
                os.kill(child.pid, signal.SIGTERM)

    for number in SIGNALS:
        signal.signal(number, forward)
    return _wait_for(children)


def _wait_for(children: list[multiprocessing.Process]) -> int:
    """The exit code of the first child that fails; none outlives it for long."""
    code, deadline = DONE, None
    alive = list(children)
    while alive:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        wait([child.sentinel for child in alive], timeout=left)
        for child in [child for child in alive if not child.is_alive()]:
            alive.remove(child)
            if child.exitcode != DONE and code == DONE:
                code, deadline = child.exitcode, time.monotonic() + GRACE_SECONDS
                if code < 0:
                    name = signal.Signals(-code).name
                    complain(f"process {children.index(child)} of this machine died of {name}")
                    code = FAILED
        if deadline is not None and time.monotonic() >= deadline:
            for child in alive:
                child.kill()
    return code


def _run_as_child(run: Run, cfg: CfgNode, place: Place, start_method: str) -> None:
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    # Python makes "spawn" the child's own default, and so that of its loaders' workers.
    multiprocessing.set_start_method(start_method, force=True)
    parent = multiprocessing.parent_process()

    def follow_parent() -> None:
        wait([parent.sentinel])
        end_process(FAILED)

    threading.Thread(target=follow_parent, daemon=True).start()
    sys.exit(_run_in_place(run, cfg, place))


def _run_alone(run: Run, cfg: CfgNode) -> int:
    stop = StopRequest().listen()
    code = _run_and_tell(lambda: run(cfg, stop))
    if code == INTERRUPTED:  # now, whatever the loader's workers are at
        end_process(code)
    return code


def _run_in_place(run: Run, cfg: CfgNode, place: Place) -> int:
    stop = StopRequest().listen()
    code = _run_and_tell(lambda: _join_and_run(run, cfg, place, stop))
    if code != DONE:
        end_process(code)
    return code


def _run_and_tell(work: Callable[[], None]) -> int:
    return exit_code_of(plain_reasons()(work), os_error=FAILED)


def _join_and_run(run: Run, cfg: CfgNode, place: Place, stop: StopRequest) -> None:
    heartbeat = _join(cfg, place)
    run(cfg, stop)
    dist.barrier()
    heartbeat.stop()
    dist.destroy_process_group()


def _join(cfg: CfgNode, place: Place) -> Heartbeat:
    """Meet the other processes of the run, and form a group with them."""
    backend = "gloo"
    if cfg.NUM_GPUS > 0:
        torch.cuda.set_device(place.local_rank)
        backend = f"cpu:gloo,cuda:{cfg.DIST_BACKEND}"
    if place.init_method == "env://":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    else:
        where = urlsplit(place.init_method)
        host, port = where.hostname or "", where.port or 0
    patience = min(cfg.DIST_TIMEOUT, RENDEZVOUS_SECONDS)
    try:
        store, heartbeat = meet(cfg, place.rank, place.world_size, host, port, patience)
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=datetime.timedelta(seconds=cfg.DIST_TIMEOUT),
        )
        return heartbeat
    except UserError:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RunError(
            f"process {place.rank} of {place.world_size} could not meet the others at "
            f"{host}:{port} within {patience} s: {first_line(error)}"
        ) from None


def _port(address: str) -> int | None:
    try:
        return urlsplit(address).port
    except ValueError:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
