"""Rendezvous: all ranks find each other and check that their fingerprints are equal.

The ranks communicate through the TCP store, before a process group exists:
1. Each rank except 0 takes a ticket number and waits for a reply to it.
2. Rank 0 draws a random run id and replies to every ticket with this id. The reply proves that
   rank 0 is alive. Other keys do not prove it, because torchrun keeps its store, with the keys
   of dead processes, when it restarts the ranks.
3. Each rank compares its fingerprint with that of rank 0. If the fingerprints are equal, the
   rank registers itself; otherwise it publishes the difference and exits.
4. Rank 0 publishes the verdict: an empty string to start the run, or the reason to exit.

The ranks poll the store, so that no call to the store waits for another rank: the watchdog of
`heartbeat` ends a rank whose call to the store does not return.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from fvcore.common.config import CfgNode

from slowfast_lara.engine.fingerprint import differences
from slowfast_lara.engine.heartbeat import Heartbeat
from slowfast_lara.errors import JOINED, LAUNCH_DIR, InputError, RunError, Stopped, counted
from slowfast_lara.files import parse_json

RENDEZVOUS_SECONDS = 300
POLL_SECONDS = 0.1
# Key in `rank_store`. The value is 2 N during the rendezvous of restart N, and 2 N + 1 afterwards.
# The first start has N = 0. Under torchrun, the value is the number of completed rendezvous.
PHASE = "phase"
# If a process reports a different fingerprint, rank 0 waits this long before it gives up. Ranks
# that join in this time report the difference, too. If the process belongs to another run, the
# missing rank of this run may still join.
SETTLE_SECONDS = 10
# After a negative verdict, rank 0 keeps the store open until all ranks have read the verdict, but
# at most this long. Without the store, ranks that start late would try to connect for minutes.
LATE_SECONDS = 30


@dataclass(frozen=True)
class RankInfo:
    """Rank of a process, and address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    # Whether the launcher or torchrun serves the store; the store then outlives the ranks.
    launcher_store: bool = False


def rendezvous_timeout(cfg: CfgNode) -> int:
    """Return the seconds that a node waits for the other nodes."""
    return min(cfg.DIST_TIMEOUT, RENDEZVOUS_SECONDS)


def rank_store(store: dist.Store) -> dist.Store:
    """Return the part of the store that the ranks use for the rendezvous (a key prefix)."""
    return dist.PrefixStore("rendezvous", store)


def join_run(
    fingerprint: dict[str, str], info: RankInfo, timeout: float, heartbeat: Heartbeat
) -> dist.Store:
    """Join the other ranks and start the heartbeat; return a store for the process group.

    Raises InputError on all ranks if the fingerprints differ; TimeoutError if ranks are missing.
    """
    heartbeat.poll()  # after a signal, do not open a store that rank 0 is about to close
    serves_store = info.rank == 0 and not info.launcher_store
    if not serves_store:
        wait_for_server(info.host, info.port, timeout, heartbeat.poll)
    group_store = open_store(info.host, info.port, timeout, serve=serves_store)
    store = rank_store(open_store(info.host, info.port, timeout, serve=False))
    is_restart = info.launcher_store and store.add(PHASE, 0) > 0
    rendezvous = Rendezvous(
        store, info.rank, info.world_size, heartbeat.poll, is_restart=is_restart
    )
    run_id = rendezvous.join(fingerprint, timeout)
    if info.rank == 0:
        store.add(PHASE, 1)
    if folder := os.environ.get(LAUNCH_DIR):
        Path(folder, JOINED).touch()
    # A process may arrive after the rendezvous. If rank 0 serves the store, this process belongs to
    # another run, and rank 0 replies, so that the process fails before its timeout. If the
    # store outlives the ranks, the process may belong to the next restart and must wait for the new
    # rank 0.
    on_beat = rendezvous.reply if serves_store else lambda: None
    heartbeat.start(dist.PrefixStore(run_id, store), on_beat)
    return dist.PrefixStore(run_id, group_store)


class Rendezvous:
    """The rendezvous protocol on one rank; calls `on_poll` after each poll of the store.

    In a restart, a process with another fingerprint does not shorten the wait for a lost node.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        on_poll: Callable[[], None],
        *,
        is_restart: bool = False,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._on_poll, self._is_restart = on_poll, is_restart
        self._num_replied = 0
        self._run_id = ""

    def join(self, fingerprint: dict[str, str], timeout: float) -> str:
        """Wait until all ranks have joined with the same fingerprint; return the run id."""
        deadline = time.monotonic() + timeout
        if self._rank == 0:
            self._lead(fingerprint, deadline)
        else:
            self._follow(fingerprint, deadline)
        return self._run_id

    def reply(self) -> None:
        """On rank 0, send the run id to all processes that arrived since the last call."""
        tickets = self._store.add("tickets", 0)
        for ticket in range(self._num_replied + 1, tickets + 1):
            self._store.set(f"reply/{ticket}", self._run_id)
        self._num_replied = tickets

    def _lead(self, fingerprint: dict[str, str], deadline: float) -> None:
        self._run_id = secrets.token_hex(8)
        self._store.set(self._key("fingerprint"), json.dumps(fingerprint))
        # Once all ranks are registered, ignore processes that report a different fingerprint: they
        # belong to another run.
        while self._count("registered") < self._world_size - 1:
            self.reply()
            if self._count("problems") and not self._is_restart:
                deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
            if time.monotonic() > deadline:
                self._give_up()
            self._pause()
        self._store.set(self._key("verdict"), "")

    def _give_up(self) -> None:
        """Raise TimeoutError; if fingerprints differ, publish a difference and raise InputError."""
        differ = self._count("problems")
        if not differ:
            joined = self._count("registered") + 1
            raise TimeoutError(f"{joined} of {self._world_size} ranks joined")
        problem = self._store.get(self._key("problem")).decode()
        problem += f"; differences on {counted(differ - 1, 'more rank')}" if differ > 1 else ""
        self._store.set(self._key("verdict"), problem)
        deadline = time.monotonic() + LATE_SECONDS
        while self._count("read") + differ < self._world_size - 1 and time.monotonic() < deadline:
            self.reply()
            self._pause()
            differ = self._count("problems")
        raise InputError(problem)

    def _follow(self, fingerprint: dict[str, str], deadline: float) -> None:
        ticket = self._store.add("tickets", 1)
        self._run_id = self._wait_for(f"reply/{ticket}", deadline)
        rank0 = parse_json(self._wait_for(self._key("fingerprint"), deadline))
        if not isinstance(rank0, dict) or not all(isinstance(it, str) for it in rank0.values()):
            raise ValueError("rank 0 published an invalid fingerprint")
        problem = differences(fingerprint, rank0, self._rank)
        if problem:
            problem = f"config, code and lists must be equal on all ranks, but {problem}"
            self._store.set(self._key("problem"), problem)  # rank 0 reports only the last one
            self._store.add(self._key("problems"), 1)
            raise InputError(problem)
        if self._store.add(self._key(f"rank/{self._rank}"), 1) > 1:
            raise InputError(
                f"rank {self._rank} has already joined the run at this address; was this process "
                "started twice, or do two runs share one --init_method?"
            )
        self._store.add(self._key("registered"), 1)
        try:
            problem = self._wait_for(self._key("verdict"), deadline)
        except Stopped:  # after a signal, the same command may be started again
            with contextlib.suppress(dist.DistError):
                self._store.add(self._key("registered"), -1)
                self._store.add(self._key(f"rank/{self._rank}"), -1)
            raise
        if problem:
            self._store.add(self._key("read"), 1)
            raise InputError(problem)

    def _wait_for(self, key: str, deadline: float) -> str:
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not reply, or some ranks did not join")
            self._pause()
        return self._store.get(key).decode()

    def _pause(self) -> None:
        self._on_poll()
        time.sleep(POLL_SECONDS)

    def _count(self, name: str) -> int:
        return self._store.add(self._key(name), 0)

    def _key(self, name: str) -> str:
        return f"{self._run_id}/{name}"


def wait_for_server(
    host: str, port: int, timeout: float, on_poll: Callable[[], None] = lambda: None
) -> None:
    """Wait until `host` listens on `port`; call `on_poll` after each failed attempt.

    TCPStore would wait, too, but the watchdog would treat this wait as a hung call.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:  # node 0 is not running or not yet in DNS
            if time.monotonic() > deadline:
                raise TimeoutError(f"node 0 does not answer ({error})") from None
        on_poll()
        time.sleep(POLL_SECONDS)


def open_store(host: str, port: int, timeout: float, *, serve: bool) -> dist.TCPStore:
    """Connect to the TCP store of the run; if `serve`, this process is the server."""
    return dist.TCPStore(
        host,
        port,
        is_master=serve,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout),
        master_listen_fd=listen(host, port).detach() if serve else None,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of `host` only or, if needed, on all interfaces.

    All interfaces are needed if other nodes cannot reach the address, or if no interface has it.
    PyTorch would always listen on all interfaces, even for tcp://localhost.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        # Debian maps a machine's own host name to a loopback address, which other nodes cannot
        # reach. If a name has several addresses, other nodes may reach only one of them. In both
        # cases, listen on all interfaces.
        ip, is_single = str(address[0]), len({info[4][0] for info in found}) == 1
        is_loopback = ipaddress.ip_address(ip).is_loopback
        if host in ("localhost", ip) or (is_single and not is_loopback):
            try:
                return socket.create_server(address, family=family, backlog=4096)
            except OSError as error:
                # Behind NAT, as in a container, no interface has the address of `host`.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=dual)
    except OSError as error:
        raise RunError(
            f"cannot listen on {host}:{port}: {error.strerror}; --init_method must name a free "
            "port of this machine"
        ) from None
