"""Launcher: starts the processes of a run on this node and returns their exit code.

- Under `torchrun`, this process is one of the ranks that torchrun has started.
- On a single node with at most one GPU and TRAIN.MAX_RESTARTS 0, this process performs the whole
  run.
- Otherwise the user starts the command once on each of the NUM_SHARDS nodes, as with PySlowFast,
  and the command runs NUM_GPUS ranks on its node (one rank if NUM_GPUS is 0).

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

from slowfast_lara.config import check_machine, load_config
from slowfast_lara.engine.fingerprint import code_versions, run_fingerprint
from slowfast_lara.engine.heartbeat import Heartbeat
from slowfast_lara.engine.interfaces import choose_interface
from slowfast_lara.engine.rendezvous import RankInfo, join_run, rendezvous_timeout
from slowfast_lara.engine.restarts import POLL_SECONDS, Outcome, run_with_restarts
from slowfast_lara.engine.shutdown import end_process, friendly_errors
from slowfast_lara.engine.signals import StopRequest, deferred_signals, ignore_signals
from slowfast_lara.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    JOINED,
    LAUNCH_DIR,
    STOPPED,
    ConfigError,
    ConnectionLost,
    InputError,
    RunError,
    Stopped,
    UserError,
    first_line,
    print_error,
    reported_error,
    run_with_exit_code,
)
from slowfast_lara.user_code import import_user_code

RunFunction = Callable[[CfgNode, StopRequest], None]

DEFAULT_INIT_METHOD = "tcp://localhost:9999"
# Exit codes after which a run is not restarted.
FINAL = (BAD_INPUT, STOPPED, INTERRUPTED)
# After one process has failed, the other processes have this long to exit; then they are killed.
GRACE_SECONDS = 30
# torchrun sets these variables in every process that it starts.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    return all(name in os.environ for name in _TORCHRUN)


def prepare(cfg_file: str, opts: Sequence[Any], init_method: str | None) -> CfgNode:
    """Load the config of a run and check that this command can run it on this machine.

    Under torchrun, its environment variables determine NUM_SHARDS, SHARD_ID and NUM_GPUS.
    """
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
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        info = RankInfo(rank, world_size, local_rank, host, port, agent_store)
        return run_process(run, cfg, info)
    per_node, restarts = max(1, cfg.NUM_GPUS), cfg.TRAIN.MAX_RESTARTS
    if per_node * cfg.NUM_SHARDS == 1 and not restarts:
        return run_process(run, cfg)
    host, port = _parse_address(init_method or DEFAULT_INIT_METHOD)
    info = RankInfo(cfg.SHARD_ID * per_node, per_node * cfg.NUM_SHARDS, 0, host, port)
    if per_node == 1 and not restarts:
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
    """Run the ranks of this node, with up to TRAIN.MAX_RESTARTS restarts; return the exit code.

    `first` describes the first rank of this node.
    """
    first = replace(first, launcher_store=cfg.TRAIN.MAX_RESTARTS > 0 and cfg.NUM_SHARDS > 1)
    context = multiprocessing.get_context("spawn")
    start_method = multiprocessing.get_start_method()
    children: dict[int, BaseProcess] = {}  # rank -> process

    def forward_signal() -> None:  # called in the thread of StopRequest
        for child in list(children.values()):
            if stop.signal_name != "SIGUSR1":
                child.terminate()
            elif child.is_alive():  # not SIGTERM: Slurm's later SIGTERM would be the second one
                os.kill(child.pid or 0, signal.SIGUSR1)

    stop, code = StopRequest(), code_versions()
    joined = False  # whether the ranks of this node have ever completed the rendezvous

    def run_ranks(exchange: Callable[[bool], bool]) -> Outcome:
        nonlocal joined
        # On a single node, use a new port in every start: DataLoader workers of a killed rank 0 may
        # still listen on the previous port.
        port = first.port if cfg.NUM_SHARDS > 1 else _free_port()
        with tempfile.TemporaryDirectory() as folder:
            if joined:
                Path(folder, JOINED).touch()
            for i in range(processes):
                info = replace(first, rank=first.rank + i, local_rank=i, port=port)
                arguments = (run, cfg, info, start_method, folder, code)
                child = context.Process(target=_run_child, args=arguments)
                with deferred_signals():
                    child.start()
                children[info.rank] = child
            if stop.requested:  # the signal may have arrived before all children started
                forward_signal()
            outcome = _wait_for(children, folder, exchange)
        joined = outcome.joined
        if stop.requested and cfg.TRAIN.MAX_RESTARTS and outcome.code not in (DONE, *FINAL):
            # Without the signal, the run would have restarted; the same command resumes it.
            outcome = replace(outcome, code=STOPPED, reason="stopped by a signal")
        return replace(outcome, final=outcome.code in FINAL or stop.requested)

    stop.listen(forward_signal)
    try:
        if cfg.TRAIN.MAX_RESTARTS:
            return run_with_restarts(run_ranks, cfg, first.host, first.port, stop)
        return run_ranks(lambda failed: failed).code
    finally:
        for child in children.values():  # still running if the launcher failed
            child.kill()
        atexit.register(ignore_signals)


def _wait_for(
    children: Mapping[int, BaseProcess], folder: str, exchange: Callable[[bool], bool]
) -> Outcome:
    """Wait for all children; return the outcome of the first failed child, else `Outcome(DONE)`.

    An exit code in FINAL takes precedence over other failures.

    GRACE_SECONDS after the first failure on this node, or on another node if `exchange` reports it,
    the children that are still running are killed. See `restarts.RunRanks` for `exchange`.
    """
    outcome, joined = Outcome(DONE), False
    deadline: float | None = None
    alive = dict(children)
    while alive:
        wait([child.sentinel for child in alive.values()], timeout=POLL_SECONDS)
        # Once True, `joined` stays True: in a long run, the system may remove old temporary files,
        # and with them the file JOINED.
        joined = joined or _have_joined(folder)
        ended = [(rank, child) for rank, child in alive.items() if not child.is_alive()]
        # Sort killed ranks first: they cause the lost connections that other ranks report.
        ended.sort(key=lambda it: (it[1].exitcode or 0) >= 0)
        for rank, child in ended:
            del alive[rank]
            # If a rank exits because of bad input, the other ranks fail too, and may exit first.
            if child.exitcode in FINAL or (child.exitcode and outcome.code == DONE):
                hung = deadline is not None and time.monotonic() >= deadline
                outcome = outcome if outcome.code in FINAL else _failure(rank, child, folder, hung)
        failed = outcome.code != DONE
        if exchange(failed and joined) or failed:
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if time.monotonic() >= deadline:
                for child in alive.values():
                    child.kill()
    return replace(outcome, joined=joined)


def _have_joined(folder: str) -> bool:
    """Whether the ranks that use the launch folder have completed the rendezvous."""
    return os.path.exists(os.path.join(folder, JOINED))


def _failure(rank: int, child: BaseProcess, folder: str, hung: bool) -> Outcome:
    code = child.exitcode or FAILED
    if code < 0:
        what = "hung" if hung else f"was killed by {_signal_name(-code)}"
        print_error(f"rank {rank} {what}")
        killed = code == -signal.SIGKILL and not hung
        return Outcome(FAILED, f"rank {rank} {what}", killed=killed)
    return Outcome(code, f"rank {rank}: {reported_error(folder, child.pid)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _run_child(
    run: RunFunction,
    cfg: CfgNode,
    info: RankInfo,
    start_method: str,
    folder: str,
    code: dict[str, str],
) -> None:
    os.environ[LAUNCH_DIR] = folder
    # In a spawned process, the default start method is "spawn". Restore the launcher's default,
    # which DataLoader workers then use.
    multiprocessing.set_start_method(start_method, force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = info if info.world_size > 1 else None
    sys.exit(run_with_exit_code(lambda: _import_code(code)) or run_process(run, cfg, rank))


def _import_code(expected: dict[str, str]) -> None:
    """Import the user's modules; raise InputError if any code differs from the launcher's.

    Restarted ranks import all modules again. Without this check, they would silently run code that
    was edited since the start.
    """
    import_user_code()
    changed = [name for name, version in code_versions().items() if version != expected.get(name)]
    if changed:
        raise InputError(
            f"{' and '.join(changed)} changed after this command started; start it again to resume "
            "with the new code"
        )


def _end_with_parent() -> None:
    """Wait until the launcher exits, then end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        end_process(FAILED)


def run_process(run: RunFunction, cfg: CfgNode, info: RankInfo | None = None) -> int:
    """Call `run` in this process; return the exit code.

    `info` describes this rank; it is None if the run needs no process group. If `info` is given, or
    if the run fails while DataLoader workers are alive, the process exits without returning.
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
    # The threads of gloo outlive the process group. If one of them releases a tensor while Python
    # shuts down, Python aborts ("terminate called without an active exception").
    if info is not None or (code != DONE and multiprocessing.active_children()):
        end_process(code)
    # At exit, Python would wait for hanging DataLoader workers, when signals are already ignored.
    for worker in multiprocessing.active_children():
        worker.kill()
    atexit.register(ignore_signals)
    return code


def _run_rank(run: RunFunction, cfg: CfgNode, info: RankInfo, stop: StopRequest) -> None:
    heartbeat = _init_process_group(cfg, info, stop)
    try:
        with friendly_errors():
            run(cfg, stop)
            dist.barrier()
    except Stopped:
        raise
    except ConnectionLost as error:
        raise heartbeat.other_failure() or error from None
    except Exception as error:
        heartbeat.share_failure(error)
        raise
    heartbeat.stop()
    dist.destroy_process_group()


def _init_process_group(cfg: CfgNode, info: RankInfo, stop: StopRequest) -> Heartbeat:
    backend = "gloo"
    if cfg.NUM_GPUS > 0:
        torch.cuda.set_device(info.local_rank)
        backend = f"cpu:gloo,cuda:{cfg.DIST_BACKEND}"
    if cfg.NUM_SHARDS > 1:
        choose_interface(info.host)
    timeout = rendezvous_timeout(cfg)
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
