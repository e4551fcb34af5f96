"""Restarts: after a failure, the ranks of all nodes start again from the newest checkpoint.

With TRAIN.MAX_RESTARTS above 0, each node has a launcher process, which outlives its ranks. If the
run has several nodes, the launcher of node 0 serves the TCP store. All launchers use this store
to agree on a restart or an exit:

1. Each launcher publishes how its ranks ended. The first failure also ends the ranks that hang on
   other nodes.
2. The launcher of node 0 waits for the outcomes of all nodes and publishes a verdict: restart, or
   the reason to exit. A node without an outcome is lost; the restarted ranks wait for it at the
   rendezvous, as for any node.
3. A launcher that starts after all ranks have joined replaces a lost launcher. It waits for the
   next verdict before it starts its ranks.

If the run has several nodes and the ranks of a node fail by themselves before they have ever
completed the rendezvous, only this node exits, without a restart: it may belong to another run.

Bad input and signals end a run. If there was no progress since the last restart, an error also
ends the run, because it would probably recur; a killed rank or a lost node does not end the run.
After TRAIN.MAX_RESTARTS restarts, any failure ends the run.
Restarted ranks hold a new rendezvous, which no rank from before the restart can join.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist
from fvcore.common.config import CfgNode

from slowfast_lara.engine.heartbeat import Watchdog
from slowfast_lara.engine.rendezvous import (
    PHASE,
    open_store,
    rank_store,
    rendezvous_timeout,
    wait_for_server,
)
from slowfast_lara.engine.run_logging import open_log, set_up_logging
from slowfast_lara.engine.score_files import PATTERN
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import (
    DONE,
    FAILED,
    STOPPED,
    InputError,
    RunError,
    Stopped,
    first_line,
    print_error,
)
from slowfast_lara.files import parse_json
from slowfast_lara.runs import checkpoint
from slowfast_lara.runs.folder import LOG

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
# Seconds after which a node without an outcome counts as lost. Ranks of other nodes detect a
# failure within 30 s; their launcher kills them 30 s later.
LOST_SECONDS = 75
READ_SECONDS = 10  # maximum wait of node 0 for the others to read the last verdict


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a node ended: exit code, and error message of the first failed rank."""

    code: int
    reason: str = ""
    final: bool = False  # whether a restart is excluded: after bad input or a signal
    order: int = 0  # 1 for the first node that failed, 2 for the second; 0 if unknown
    joined: bool = False  # whether the ranks of this node completed a rendezvous
    killed: bool = False  # whether SIGKILL ended a rank that did not hang, or the node is lost


@dataclass(frozen=True)
class Verdict:
    """Decision to restart or to exit, with the reason."""

    restart: bool
    text: str = ""
    code: int = DONE  # exit code of every node; with DONE, each node exits with its own code


# A function that starts the ranks of this node and waits for them. Every POLL_SECONDS it calls its
# argument `exchange(failed)`. `failed` is whether a rank of this node has failed after the
# rendezvous. `exchange` returns whether a rank of any node has failed.
RunRanks = Callable[[Callable[[bool], bool]], Outcome]


def run_with_restarts(
    run_ranks: RunRanks, cfg: CfgNode, host: str, port: int, stop: StopRequest
) -> int:
    """Run the ranks of this node until the run ends; return the exit code of the launcher.

    Args:
        run_ranks: runs the ranks of this node once.
        cfg: the config of the run.
        host, port: the address of the rendezvous.
        stop: ends the waits of the launcher.
    """
    if cfg.NUM_SHARDS > 1:
        return _run_with_other_nodes(run_ranks, cfg, host, port, stop)
    judge = Judge(cfg)
    while True:
        outcome = run_ranks(lambda failed: failed)
        if not _restarts(judge.decide([outcome]), outcome, cfg):
            return outcome.code


def _run_with_other_nodes(
    run_ranks: RunRanks, cfg: CfgNode, host: str, port: int, stop: StopRequest
) -> int:
    try:
        launchers = Launchers(cfg, host, port, stop)
        outcome, verdict = Outcome(FAILED), launchers.rejoin()
        while verdict is None or _restarts(verdict, outcome, cfg):
            outcome = run_ranks(launchers.exchange)
            verdict = launchers.agree(outcome)
        launchers.close()
        return verdict.code or outcome.code
    except (dist.DistError, TimeoutError) as error:
        address = f"{host}:{port}"
        raise RunError(f"lost the launcher of node 0 at {address}: {first_line(error)}") from None


def _restarts(verdict: Verdict, outcome: Outcome, cfg: CfgNode) -> bool:
    """Log the verdict; return whether to restart."""
    set_up_logging()
    if cfg.SHARD_ID == 0 and os.path.exists(os.path.join(cfg.OUTPUT_DIR, LOG)):
        open_log(cfg.OUTPUT_DIR)
    if verdict.restart:
        logger.warning("%s", verdict.text)
    elif verdict.text and not outcome.final:  # else the ranks have printed the reason
        print_error(verdict.text)
    for handler in logging.root.handlers:  # the restarted ranks open the same file
        handler.close()
    logging.root.handlers = []
    return verdict.restart


class Judge:
    """Decides on restarts, in the launcher of node 0."""

    def __init__(self, cfg: CfgNode) -> None:
        self._maximum, self._output_dir = cfg.TRAIN.MAX_RESTARTS, cfg.OUTPUT_DIR
        self._restarts, self._progress = 0, _progress(cfg.OUTPUT_DIR)

    def decide(self, outcomes: Sequence[Outcome]) -> Verdict:
        """Decide on a restart, given the outcomes of all nodes or only a decisive one."""
        failures = [it for it in outcomes if it.code != DONE]
        failures.sort(key=lambda it: (not it.killed, it.order))
        if not failures:
            return Verdict(False)
        for failure in failures:
            if failure.final:
                return Verdict(False, f"no restart: {failure.reason}", failure.code)
        reason, before = failures[0].reason, self._progress
        self._progress = _progress(self._output_dir)
        if self._restarts == self._maximum:
            return Verdict(False, f"no restart: TRAIN.MAX_RESTARTS is {self._maximum}; {reason}")
        if self._restarts and self._progress == before and not failures[0].killed:
            return Verdict(False, f"no restart: no progress since the last restart; {reason}")
        self._restarts += 1
        number = f"Restart {self._restarts} of {self._maximum}"
        readable = filter(
            checkpoint.peek_checkpoint, reversed(checkpoint.paths_in(self._output_dir))
        )
        start = next(readable, "the beginning or saved test scores: there is no checkpoint")
        return Verdict(True, f"{number}: {reason}; resuming from {start}")


def _progress(output_dir: str) -> dict[str, tuple[int, ...]]:
    """Return size and modification time of each checkpoint, and the size of each score file.

    All checkpoints count: the newest may be a damaged one, which a run skips and does not remove.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in (*checkpoint.paths_in(output_dir), *map(str, Path(output_dir).glob(PATTERN))):
        with contextlib.suppress(FileNotFoundError):  # a rank has just removed it
            status = os.stat(path)
            is_checkpoint = path.endswith(".pyth")
            found[path] = (status.st_size, status.st_mtime_ns if is_checkpoint else 0)
    return found


class Launchers:
    """Connection of this node's launcher to those of the other nodes, through the TCP store."""

    def __init__(self, cfg: CfgNode, host: str, port: int, stop: StopRequest) -> None:
        self._node, self._nodes = cfg.SHARD_ID, cfg.NUM_SHARDS
        self._timeout = rendezvous_timeout(cfg)
        self._judge = Judge(cfg) if self._node == 0 else None
        # Node 0 needs no watchdog: it serves the store, and its files may be slow.
        self._watchdog = None if self._judge else Watchdog(f"the launcher of node {self._node}")
        self._stop = stop
        try:
            if self._judge is None:
                wait_for_server(host, port, self._timeout, self._poll)
            store = open_store(host, port, self._timeout, serve=self._judge is not None)
        except BaseException:
            self._stop_watchdog()
            raise
        self._store, self._ranks = dist.PrefixStore("launchers", store), rank_store(store)
        phase = self._ranks.add(PHASE, 0)
        self._replaces = phase % 2 == 1 and self._node > 0  # odd: all ranks have joined
        # Number of restarts so far, and order of this node's failure since then (0: no failure).
        self._generation, self._order = phase // 2, 0
        self._other_failed = False  # whether another node failed first since then

    def rejoin(self) -> Verdict | None:
        """If this launcher replaces a lost one, return the next verdict; else return None.

        Raises InputError if no launcher was lost, and RunError if the run has succeeded meanwhile.
        """
        if not self._replaces:
            return None
        seconds = max(self._timeout, 2 * LOST_SECONDS)
        has_verdict = self._wait([self._key("verdict")], seconds, self._stop.check)
        # If the node has an outcome, its launcher is not lost.
        if not has_verdict or self._store.check([self._key(f"outcome/{self._node}")]):
            raise InputError(
                f"node {self._node} has already joined the run at this address; was this command "
                "started twice, or do two runs share one --init_method?"
            )
        verdict = self._read_verdict()
        if verdict == Verdict(False):
            raise RunError(f"the run ended before node {self._node} returned")
        return verdict

    def exchange(self, failed: bool) -> bool:
        """Publish whether a rank of this node has failed; return whether any rank has failed.

        Also return True if the launcher of node 0 has exited.
        """
        self._mark_alive()
        try:
            if failed and not self._order:
                self._order = self._store.add(self._key("failures"), 1)
            if not failed and self._store.add(self._key("failures"), 0) > 0:
                self._other_failed = True
            return failed or self._other_failed
        except dist.DistError:  # without node 0, the ranks of this node must exit, too
            return True

    def agree(self, outcome: Outcome) -> Verdict:
        """Publish the outcome of this node; return the verdict of node 0's launcher.

        Verdict(False), without a text, lets this node exit with its own exit code.
        """
        # If the ranks failed by themselves before any rendezvous, this node may belong to another
        # run. If another node failed first, this node was joining a restart of the same run.
        if not outcome.joined and not self._other_failed:
            return Verdict(False)
        self.exchange(outcome.code != DONE)
        try:
            self._publish(replace(outcome, order=self._order))
            if self._judge is None:
                self._wait([self._key("verdict")], math.inf)
                return self._read_verdict()
        except dist.DistError:
            if outcome.final or outcome.code == DONE:  # exit without a verdict
                return Verdict(False)
            raise
        # If the ranks of node 0 are done, all ranks have passed the last barrier: do not wait for
        # the other outcomes.
        needs_others = outcome.code != DONE and not outcome.final
        outcomes = self._outcomes() if needs_others else [outcome]
        if needs_others and self._stop.requested:
            outcomes = [Outcome(STOPPED, "stopped by a signal", final=True)]
        verdict = self._judge.decide(outcomes)
        key = self._key("verdict")
        if verdict.restart:
            self._start_generation(self._generation + 1)
            self._ranks.set(PHASE, str(2 * self._generation))
        self._store.set(key, json.dumps(asdict(verdict)))
        return verdict

    def close(self) -> None:
        """Stop the watchdog; node 0 first waits for all launchers to read the last verdict.

        The wait takes at most READ_SECONDS.
        """
        if self._judge is not None:
            readers = [self._key(f"read/{node}") for node in range(1, self._nodes)]
            self._wait(readers, READ_SECONDS)
        self._stop_watchdog()

    def _outcomes(self) -> list[Outcome]:
        """Wait for the outcomes of all nodes; a node without outcome after LOST_SECONDS is lost.

        A signal ends the wait.
        """
        keys = [self._key(f"outcome/{node}") for node in range(self._nodes)]
        with contextlib.suppress(Stopped):
            self._wait(keys, LOST_SECONDS, self._stop.check)
        return [
            Outcome(**parse_json(self._store.get(key).decode()))
            if self._store.check([key])
            else Outcome(FAILED, f"node {node} is lost", killed=True)
            for node, key in enumerate(keys)
        ]

    def _publish(self, outcome: Outcome) -> None:
        self._store.set(self._key(f"outcome/{self._node}"), json.dumps(asdict(outcome)))

    def _read_verdict(self) -> Verdict:
        verdict = Verdict(**parse_json(self._store.get(self._key("verdict")).decode()))
        self._store.set(self._key(f"read/{self._node}"), "")
        # Node 0 sets PHASE before the verdict. It may have restarted the run several times, if this
        # launcher was suspended meanwhile.
        self._start_generation(self._ranks.add(PHASE, 0) // 2)
        return verdict

    def _start_generation(self, number: int) -> None:
        self._generation, self._order, self._other_failed = number, 0, False

    def _wait(
        self, keys: list[str], seconds: float, on_poll: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until all keys are in the store, at most `seconds`; return whether they are."""
        deadline = time.monotonic() + seconds
        while not (found := self._store.check(keys)) and time.monotonic() < deadline:
            self._mark_alive()
            on_poll()
            time.sleep(POLL_SECONDS)
        return found

    def _poll(self) -> None:
        self._mark_alive()
        self._stop.check()

    def _mark_alive(self) -> None:
        if self._watchdog:
            self._watchdog.mark_alive()

    def _stop_watchdog(self) -> None:
        if self._watchdog:
            self._watchdog.stop()

    def _key(self, name: str) -> str:
        return f"{self._generation}/{name}"
