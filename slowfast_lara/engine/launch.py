"""Starting all the processes of a run from one command.

There are three cases. With one GPU or none, the run is this process itself. With
several GPUs or machines, the command is given once on each of NUM_SHARDS machines and
starts NUM_GPUS processes there, as in PySlowFast. Under `torchrun` the processes are
there already, and this one is one of them.

PySlowFast's own launcher needs CUDA even to run on a CPU, waits without a limit for
machines that do not come, and leaves processes running when one of them fails.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

from slowfast_lara.config import check_machine, load_config
from slowfast_lara.engine.heartbeat import Heartbeat
from slowfast_lara.engine.rendezvous import meet
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

logger = logging.getLogger(__name__)

Run = Callable[[CfgNode, StopRequest], None]

DEFAULT_INIT_METHOD = "tcp://localhost:9999"
# How long processes wait for each other at the start.
RENDEZVOUS_SECONDS = 300
# When one process has failed, the others have this long to end by themselves.
GRACE_SECONDS = 30
# torchrun sets these variables in every process it starts.
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
    cfg = _with_torchrun_counts(load_config(cfg_file, opts))
    told = init_method is not None or "SHARD_ID" in opts or "NUM_SHARDS" in opts
    if cfg.NUM_SHARDS > 1 and cfg.SHARD_ID == 0 and not told and not under_torchrun():
        # Without an address, this process would wait for machines that cannot find it.
        raise ConfigError(
            f"NUM_SHARDS is {cfg.NUM_SHARDS} in {cfg_file}; on each of so many machines "
            "--shard_id I --init_method tcp://HOST:PORT is expected, or NUM_SHARDS 1 for this "
            "one alone"
        )
    check_machine(cfg)
    return cfg


def _with_torchrun_counts(cfg: CfgNode) -> CfgNode:
    """Under torchrun, the config with torchrun's number of machines and processes."""
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
    """Run `run` in every process of this command; the exit code."""
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
    """Start this machine's processes and wait for them; `first` is the place of the first."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(
                target=_run_as_child,
                args=(
                    run,
                    cfg,
                    replace(first, rank=first.rank + i, local_rank=i),
                    multiprocessing.get_start_method(),
                    folder,
                ),
            )
            for i in range(processes)
        ]
        for child in children:
            child.start()

        def forward() -> None:
            for child in children:
                child.terminate()

        StopRequest().listen(forward)
        code = _wait_for(children)
    atexit.register(ignore_signals)
    return code


def _wait_for(children: Sequence[BaseProcess]) -> int:
    """The exit code of the first child that fails; the others are killed GRACE_SECONDS later."""
    code: int = DONE
    deadline: float | None = None
    alive = list(children)
    while alive:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        wait([child.sentinel for child in alive], timeout=left)
        for child in [child for child in alive if not child.is_alive()]:
            alive.remove(child)
            if child.exitcode and code == DONE:
                code, deadline = child.exitcode, time.monotonic() + GRACE_SECONDS
                if code < 0:
                    name = signal.Signals(-code).name
                    print_error(f"process {children.index(child)} of this machine died of {name}")
                    code = FAILED
        if deadline is not None and time.monotonic() >= deadline:
            for child in alive:
                child.kill()
    return code


def _run_as_child(run: Run, cfg: CfgNode, place: Place, start_method: str, folder: str) -> None:
    os.environ[LAUNCH_DIR] = folder
    # Python made "spawn" the default of this process. The workers of its data loaders are to
    # be started as they are in a run of one process.
    multiprocessing.set_start_method(start_method, force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(_run_in_place(run, cfg, place))


def _end_with_parent() -> None:
    """Wait until the command that started this process is gone, then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        end_process(FAILED)


def _run_alone(run: Run, cfg: CfgNode) -> int:
    stop = StopRequest().listen()
    return _run_to_the_end(lambda: run(cfg, stop), alone=True)


def _run_in_place(run: Run, cfg: CfgNode, place: Place) -> int:
    stop = StopRequest().listen()
    return _run_to_the_end(lambda: _join_and_run(run, cfg, place, stop), alone=False)


def _run_to_the_end(work: Callable[[], None], *, alone: bool) -> int:
    """The exit code. After a failure, a process with others around it ends here."""
    errors = []

    @friendly_errors()
    def keep_error() -> None:
        try:
            work()
        except BaseException as error:
            # With the error we keep the loaders it came from. PyTorch would wait for their
            # workers before they go, ten seconds for each that is stalled.
            errors.append(error)
            raise

    code = run_with_exit_code(keep_error, os_error=FAILED)
    if code != DONE and (not alone or multiprocessing.active_children()):
        end_process(code)
    # The work is done: Python would wait for workers that are stalled, and heed no signal.
    for worker in multiprocessing.active_children():
        worker.kill()
    atexit.register(ignore_signals)
    return code


def _join_and_run(run: Run, cfg: CfgNode, place: Place, stop: StopRequest) -> None:
    heartbeat = _join(cfg, place)
    heartbeat.share(stop)
    run(cfg, stop)
    dist.barrier()
    heartbeat.stop()
    # Python aborts if it ends while another thread is inside PyTorch.
    heartbeat.join(timeout=10)
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
