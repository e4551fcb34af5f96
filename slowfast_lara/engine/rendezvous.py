"""The processes of a run meet, and make sure that all of them run the same thing.

They speak through the run's key-value store, before there is a process group:
1. Each process but the first takes a number, and waits for the answer to it.
2. Process 0 answers every number with the run's identity, which it has just made up.
   (An answer says that process 0 is alive: torchrun keeps its store over a restart,
   with all that dead processes have left there.)
3. Each compares what process 0 runs with what it runs itself, and takes its place in
   the run if there is no difference. If there is one, it says so and ends.
4. Process 0 tells all that they may begin, or why not.

No call waits inside the store, and a `Watchdog` looks whether the calls come back:
so nothing hangs, whatever happens to the others.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.engine.heartbeat import Heartbeat, Watchdog
from slowfast_lara.errors import InputError, RunError
from slowfast_lara.files import check_regular_file, parse_json

# What a machine may have for itself: it changes no result.
MAY_DIFFER = ("SHARD_ID", "DATA_LOADER.NUM_WORKERS", "DATA_LOADER.PIN_MEMORY")
LISTS = (
    "train.csv",
    "val.csv",
    "test.csv",
    "something-something-v2-labels.json",
    "something-something-v2-train.json",
    "something-something-v2-validation.json",
)
POLL_SECONDS = 0.1
# How long a run waits for the others after one that differs: all are to hear of it, and the
# right one may yet come if the wrong one belongs to another run.
SETTLE_SECONDS = 10
# How long the store stays after that for those who are still to come: they would wait for it in
# vain for minutes. It goes as soon as all have read why the run ends.
LATE_SECONDS = 30
MAX_NAMED = 8


def meet(
    cfg: CfgNode, rank: int, world_size: int, host: str, port: int, seconds: float
) -> tuple[dist.Store, Heartbeat]:
    """Meet the others of the run: a store for the process group, and the heartbeat, begun.

    Raises InputError on all processes if one of them runs something else.
    """
    description = describe(cfg, world_size)
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_store = rank == 0 and not of_torchrun
    group_store = open_store(host, port, seconds, keep=keeps_store)
    store = dist.PrefixStore("meeting", open_store(host, port, seconds, keep=False))
    watchdog = Watchdog(rank)
    watchdog.start()
    meeting = Meeting(store, rank, world_size, watchdog.mark_alive)
    identity = meeting.hold(description, seconds)
    # A process that comes to a full run is of another one, and is told so; under torchrun,
    # it may be of this one's next attempt, and waits for that.
    each_beat = meeting.answer if keeps_store else lambda: None
    heartbeat = Heartbeat(dist.PrefixStore(identity, store), rank, world_size, watchdog, each_beat)
    heartbeat.start()
    return dist.PrefixStore(identity, group_store), heartbeat


# What is compared.


def describe(cfg: CfgNode, world_size: int) -> dict[str, str]:
    """All that must be the same on the processes of a run, by name."""
    return {
        "the number of processes": str(world_size),
        "the code": f"{slowfast_lara.__version__} ({_hash_of_code()})",
        "torch": torch.__version__,
        "pyslowfast": metadata.version("pyslowfast"),
        **{key: value for key, value in _settings(cfg) if key not in MAY_DIFFER},
        **{name: _hash_of_list(Path(cfg.DATA.PATH_TO_DATA_DIR, name)) for name in LISTS},
    }


def _settings(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        if isinstance(value, CfgNode):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", repr(value)


def _hash_of_code() -> str:
    folder = Path(slowfast_lara.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _hash_of_list(path: Path) -> str:
    digest, lines = hashlib.sha256(), 0
    try:
        check_regular_file(path)
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                lines += block.count(b"\n")
    except OSError as error:  # the loader complains if it needs the file
        return f"unreadable ({error.strerror})"
    return f"{lines} lines ({digest.hexdigest()[:12]})"


def differences(ours: dict[str, str], theirs: dict[str, str], rank: int) -> str:
    """What process `rank` has otherwise than process 0, in words; "" if nothing."""
    keys = [key for key in theirs | ours if ours.get(key) != theirs.get(key)]
    if not keys:
        return ""
    named = [
        f"{key} is {ours.get(key, 'unknown'):.200} on process {rank} and "
        f"{theirs.get(key, 'unknown'):.200} on process 0"
        for key in keys[:MAX_NAMED]
    ]
    more = [f"{len(keys) - MAX_NAMED} more differ"] if len(keys) > MAX_NAMED else []
    return "; ".join(named + more)


# The meeting.


class Meeting:
    """One process's part in the meeting; `mark_alive` is called after calls to the store."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, mark_alive: Callable[[], None]
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._came_back = mark_alive
        self._answered = 0
        self._identity = ""

    def hold(self, description: dict[str, str], seconds: float) -> str:
        """The identity of the run, once all of its processes are there and agree."""
        deadline = time.monotonic() + seconds
        if self._rank == 0:
            self._lead(description, deadline)
        else:
            self._join(description, deadline)
        return self._identity

    def answer(self) -> None:
        """Process 0: tell all that have come since the last time which run this is."""
        numbers = self._store.add("numbers", 0)
        for number in range(self._answered + 1, numbers + 1):
            self._store.set(f"answer/{number}", self._identity)
        self._answered = numbers

    def _lead(self, description: dict[str, str], deadline: float) -> None:
        self._identity = secrets.token_hex(8)
        self._store.set(self._key("description"), json.dumps(description))
        settling = False
        # Once all are there, a difference is of a process of another run.
        while self._count("placed") < self._world_size - 1:
            self.answer()
            if not settling and self._count("problems"):
                settling, deadline = True, min(deadline, time.monotonic() + SETTLE_SECONDS)
            if time.monotonic() > deadline:
                self._give_up()
            self._pause()
        self._store.set(self._key("verdict"), "")

    def _give_up(self) -> None:
        """Tell those who are there why there will be no run."""
        differ = self._count("problems")
        if not differ:
            there = self._count("placed") + 1
            raise TimeoutError(f"{there} of {self._world_size} processes were there")
        problem = self._store.get(self._key("problem")).decode()
        problem += f"; {differ - 1} more processes differ" if differ > 1 else ""
        self._store.set(self._key("verdict"), problem)
        deadline = time.monotonic() + LATE_SECONDS
        while self._count("read") + differ < self._world_size - 1 and time.monotonic() < deadline:
            self.answer()
            self._pause()
            differ = self._count("problems")
        raise InputError(problem)

    def _join(self, description: dict[str, str], deadline: float) -> None:
        number = self._store.add("numbers", 1)
        self._identity = self._wait_for(f"answer/{number}", deadline)
        first = self._description_of_first(deadline)
        problem = differences(description, first, self._rank)
        if problem:
            problem = f"all processes of a run must run the same thing, but {problem}"
            self._store.set(self._key("problem"), problem)  # one is named, all are counted
            self._store.add(self._key("problems"), 1)
            raise InputError(problem)
        if self._store.add(self._key(f"place/{self._rank}"), 1) > 1:
            raise InputError(
                f"the run that meets here has its process {self._rank} already; "
                "was this one started twice, or do two runs use one --init_method?"
            )
        self._store.add(self._key("placed"), 1)
        problem = self._wait_for(self._key("verdict"), deadline)
        if problem:
            self._store.add(self._key("read"), 1)
            raise InputError(problem)

    def _description_of_first(self, deadline: float) -> dict[str, str]:
        told = parse_json(self._wait_for(self._key("description"), deadline))
        if not isinstance(told, dict) or not all(isinstance(it, str) for it in told.values()):
            raise ValueError("what process 0 says of its run cannot be read")
        return told

    def _wait_for(self, key: str, deadline: float) -> str:
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError("process 0 did not answer, or not all of the others came")
            self._pause()
        return self._store.get(key).decode()

    def _pause(self) -> None:
        self._came_back()
        time.sleep(POLL_SECONDS)

    def _count(self, name: str) -> int:
        return self._store.add(self._key(name), 0)

    def _key(self, name: str) -> str:
        return f"{self._identity}/{name}"


# The store.


def open_store(host: str, port: int, seconds: float, *, keep: bool) -> dist.TCPStore:
    """A connection to the run's store, which this process keeps itself or another one does."""
    return dist.TCPStore(
        host,
        port,
        is_master=keep,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=seconds),
        master_listen_fd=listen(host, port).detach() if keep else None,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address asked for, and at no other where that can be.

    PyTorch would listen at all addresses of the machine, also for tcp://localhost.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Debian gives a machine's own name a loopback address, which others cannot reach.
        if host == "localhost" or _is_address(host) or not _is_loopback(str(address[0])):
            try:
                return socket.create_server(address, family=family, backlog=4096)
            except OSError as error:
                # An address that is translated on the way, as for containers, is not ours.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=4096)
    except OSError as error:
        raise RunError(
            f"cannot listen at {host}:{port}: {error.strerror}; a free port of this machine is "
            "expected for --init_method"
        ) from None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
