"""Restarts after failures: same results as undisturbed runs; none after bad input and signals."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.engine import heartbeat, launch, restarts
from slowfast_lara.engine.launch import _wait_for
from slowfast_lara.engine.rendezvous import PHASE, open_store, rank_store
from slowfast_lara.engine.restarts import Judge, Launchers, Outcome, Verdict
from slowfast_lara.engine.signals import StopRequest
from slowfast_lara.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    JOINED,
    STOPPED,
    ConfigError,
    InputError,
    RunError,
)
from slowfast_lara.user_code import VARIABLE
from tests.helpers.isolation import ip, linked_namespaces, why_no_network_namespaces
from tests.helpers.launchers import (
    command_line,
    descendants,
    iterations,
    linux_only,
    start_node,
    start_spawning,
)
from tests.helpers.runs import (
    RUN_NET,
    finish,
    free_port,
    kill_group,
    load_checkpoint,
    same_tensors,
    start,
    wait_for,
    write_config,
)

EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
KILLED = Outcome(FAILED, "rank 1 was killed by SIGKILL", order=2, killed=True)
ERROR = Outcome(FAILED, "rank 2: lost connection to another rank", order=1)
LAST = "checkpoint_epoch_00020.pyth"
TRAINING = {
    "SOLVER__MAX_EPOCH": 20,
    "TRAIN__EVAL_PERIOD": 20,
    "TRAIN__CHECKPOINT_PERIOD": 100,
    "TRAIN__CHECKPOINT_ITERATIONS": 3,
    "TRAIN__CHECKPOINT_KEEP": 2,
    "TEST__SAVE_RESULTS_PATH": "scores.npz",
    "VIT__DROP_PATH": 0.2,
    "DATA_LOADER__NUM_WORKERS": 1,
}
START_SECONDS, END_SECONDS = 180, 240  # generous limits for a loaded machine
ENDLESS = {**TRAINING, "SOLVER__MAX_EPOCH": 100000, "TRAIN__EVAL_PERIOD": 100000}


# The decision


@pytest.fixture()
def judge(tmp_path):
    output = tmp_path / "out"
    (output / "checkpoints").mkdir(parents=True)
    config = write_config(tmp_path / "c.yaml", tmp_path, output, TRAIN__MAX_RESTARTS=2)
    return Judge(load_config(config))


def save(folder: Path, samples: int) -> Path:
    path = folder / f"out/checkpoints/checkpoint_epoch_00000_sample_{samples:09d}.pyth"
    torch.save({"epoch": -1}, path)
    return path


def test_a_failure_restarts_from_the_newest_checkpoint(judge, tmp_path):
    save(tmp_path, 4)
    verdict = judge.decide([Outcome(DONE), KILLED, ERROR])  # killed: the cause of the other
    assert verdict.restart
    start = "Restart 1 of 2: rank 1 was killed by SIGKILL; resuming from "
    assert verdict.text.startswith(start) and verdict.text.endswith("sample_000000004.pyth")


def test_restarts_are_limited(judge, tmp_path):
    for samples in (4, 8):
        save(tmp_path, samples)
        assert judge.decide([KILLED]).restart
    save(tmp_path, 12)
    expected = "no restart: TRAIN.MAX_RESTARTS is 2; rank 1 was killed by SIGKILL"
    assert judge.decide([KILLED]) == Verdict(False, expected)


def test_an_error_that_recurs_without_progress_ends_the_run(judge):
    first = judge.decide([KILLED])
    expected = "from the beginning or saved test scores: there is no checkpoint"
    assert first.restart and first.text.endswith(expected)
    verdict = judge.decide([ERROR])
    assert "no progress" in verdict.text and not verdict.restart


def test_a_rank_that_is_killed_again_without_progress_is_restarted(judge):
    assert judge.decide([ERROR]).restart and judge.decide([KILLED]).restart
    assert not judge.decide([KILLED]).restart  # TRAIN.MAX_RESTARTS is 2


def test_scores_of_a_test_are_progress(judge, tmp_path):
    assert judge.decide([ERROR]).restart
    (tmp_path / "out" / "test_scores.abc.part").write_text("scores")
    assert judge.decide([ERROR]).restart


def test_a_damaged_newest_checkpoint_is_neither_the_start_nor_a_lack_of_progress(judge, tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 12).write_bytes(b"damaged")
    first = judge.decide([ERROR])
    assert first.restart and first.text.endswith("sample_000000004.pyth")
    save(tmp_path, 8)
    second = judge.decide([ERROR])
    assert second.restart and second.text.endswith("sample_000000008.pyth")


@pytest.mark.parametrize("code", [BAD_INPUT, STOPPED])
def test_final_outcomes_end_the_run(judge, code):
    verdict = judge.decide([KILLED, Outcome(code, "rank 0: the reason", final=True, order=3)])
    assert verdict == Verdict(False, "no restart: rank 0: the reason", code)
    assert judge.decide([Outcome(DONE), Outcome(DONE)]) == Verdict(False)


def test_restarts_need_auto_resume(tmp_path):
    changes = {"TRAIN__MAX_RESTARTS": 1, "TRAIN__AUTO_RESUME": False}
    with pytest.raises(ConfigError, match="TRAIN.MAX_RESTARTS is 1; must be 0 if"):
        load_config(write_config(tmp_path / "c.yaml", tmp_path, tmp_path / "out", **changes))


@pytest.mark.parametrize(
    "codes, expected",
    [((0, 0), 0), ((0, 3), 3), ((1, 2), 2), ((75, 1), 75), ((1, 130), 130), ((2, 75), 2)],
)
def test_bad_input_and_signals_take_precedence_over_failures(tmp_path, codes, expected):
    """Ranks that exit at the same time."""
    context = multiprocessing.get_context("fork")
    ranks = dict(enumerate(context.Process(target=os._exit, args=(code,)) for code in codes))
    for rank in ranks.values():
        rank.start()
    for rank in ranks.values():
        rank.join()
    outcome = _wait_for(ranks, str(tmp_path), lambda failed: failed)
    assert outcome.code == expected
    assert not expected or outcome.reason.startswith(f"rank {codes.index(expected)}: ")


def test_a_killed_rank_takes_precedence_over_the_lost_connections_of_others(tmp_path):
    context = multiprocessing.get_context("fork")
    kill = context.Process(target=signal.raise_signal, args=(signal.SIGKILL,))
    ranks = {0: context.Process(target=os._exit, args=(1,)), 1: kill}
    for rank in ranks.values():
        rank.start()
    for rank in ranks.values():
        rank.join()
    outcome = _wait_for(ranks, str(tmp_path), lambda failed: failed)
    assert outcome == Outcome(FAILED, "rank 1 was killed by SIGKILL", killed=True)


def test_a_signal_without_a_name(tmp_path):
    kill = multiprocessing.get_context("fork").Process(target=kill_by_real_time_signal)
    kill.start()
    outcome = _wait_for({0: kill}, str(tmp_path), lambda failed: failed)
    assert outcome == Outcome(FAILED, f"rank 0 was killed by signal {signal.SIGRTMIN + 5}")


def kill_by_real_time_signal():
    os.kill(os.getpid(), signal.SIGRTMIN + 5)


def test_a_rank_that_hangs_after_the_failure_of_another_node_is_not_its_cause(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0)
    rank = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    rank.start()
    outcome = _wait_for({1: rank}, str(tmp_path), lambda failed: True)
    assert outcome == Outcome(FAILED, "rank 1 hung")


# The agreement of the launchers, with a thread for each


class Nodes:
    """Launchers of three nodes, with short waits."""

    def __init__(self, folder: Path, timeout: int = 2) -> None:
        self._config = write_config(
            folder / "c.yaml", folder, folder / "out", TRAIN__MAX_RESTARTS=2, DIST_TIMEOUT=timeout
        )
        self._port, self._pool = free_port(), ThreadPoolExecutor(8)
        self._added: list[Launchers] = []
        self.stop = StopRequest()
        self.launchers = [self.add(node) for node in range(3)]

    def add(self, node: int) -> Launchers:
        cfg = load_config(self._config, ("NUM_SHARDS", 3, "SHARD_ID", node))
        self._added.append(Launchers(cfg, "127.0.0.1", self._port, self.stop))
        return self._added[-1]

    def set_running(self) -> None:
        rank_store(open_store("127.0.0.1", self._port, 10, serve=False)).add(PHASE, 1)

    def agree(self, outcomes: dict[int, Outcome]):
        return {
            node: self._pool.submit(self.launchers[node].agree, replace(outcome, joined=True))
            for node, outcome in outcomes.items()
        }

    def submit(self, *arguments):
        return self._pool.submit(*arguments)

    def close(self) -> None:
        for launcher in reversed(self._added):
            launcher.close()


@pytest.fixture()
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "LOST_SECONDS", 1)
    monkeypatch.setattr(restarts, "READ_SECONDS", 1)
    monkeypatch.setattr(heartbeat, "MISSED_BEATS", math.inf)  # a watchdog would end this process
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


def test_all_launchers_get_the_verdict_on_the_first_failure(nodes):
    assert not nodes.launchers[2].exchange(False)
    assert nodes.launchers[1].exchange(True) and nodes.launchers[2].exchange(False)
    outcomes = {node: Outcome(FAILED, f"rank {node}: failed") for node in range(3)}
    verdicts = {future.result(timeout=20) for future in nodes.agree(outcomes).values()}
    assert len(verdicts) == 1
    assert verdicts.pop().text.startswith("Restart 1 of 2: rank 1: failed; ")
    assert not any(launcher.exchange(False) for launcher in nodes.launchers)


def test_a_node_without_an_outcome_is_lost(nodes):
    futures = nodes.agree({0: KILLED, 1: KILLED})
    texts = {future.result(timeout=20).text for future in futures.values()}
    assert len(texts) == 1 and texts.pop().startswith("Restart 1 of 2: node 2 is lost; ")


def test_bad_input_on_one_node_ends_all(nodes):
    bad = Outcome(BAD_INPUT, "rank 1: no such list", final=True)
    futures = nodes.agree({0: KILLED, 1: bad, 2: KILLED})
    verdict = Verdict(False, "no restart: rank 1: no such list", BAD_INPUT)
    assert {future.result(timeout=20) for future in futures.values()} == {verdict}


def test_a_launcher_replaces_a_lost_one(nodes):
    nodes.set_running()
    waiting = nodes.submit(nodes.add(2).rejoin)
    time.sleep(0.5)
    assert not waiting.done() and not nodes.launchers[0].exchange(False)
    futures = [*nodes.agree({0: KILLED, 1: KILLED}).values(), waiting]
    assert len({future.result(timeout=20) for future in futures}) == 1
    assert nodes.add(2).rejoin() is None  # the next rendezvous is open


def test_a_second_launcher_of_a_node_does_not_change_the_verdict(nodes):
    nodes.set_running()
    second = nodes.submit(nodes.add(2).rejoin)
    time.sleep(0.5)
    reason = Outcome(FAILED, "rank 2: the reason")
    nodes.launchers[2].exchange(True)  # the first failure
    futures = nodes.agree({0: ERROR, 1: ERROR, 2: reason}).values()
    (text,) = {future.result(timeout=20).text for future in futures}
    assert text.startswith("Restart 1 of 2: rank 2: the reason; ")
    with pytest.raises(InputError, match="node 2 has already joined"):
        second.result(timeout=20)


def test_a_signal_ends_the_wait_for_the_outcomes(nodes, monkeypatch):
    monkeypatch.setattr(restarts, "LOST_SECONDS", 600)
    (verdict,) = nodes.agree({0: KILLED}).values()
    time.sleep(1)
    assert not verdict.done()
    nodes.stop.request("SIGTERM")
    expected = Verdict(False, "no restart: stopped by a signal", STOPPED)
    assert verdict.result(timeout=20) == expected


def test_a_launcher_that_missed_a_restart_catches_up(nodes):
    """It was suspended meanwhile."""
    for _ in range(2):
        futures = nodes.agree({0: KILLED, 1: KILLED}).values()
        assert all(future.result(timeout=20).restart for future in futures)
    assert nodes.launchers[2].agree(replace(ERROR, joined=True)).restart
    assert not nodes.launchers[2].exchange(False)  # nothing has failed since restart 2


def test_a_final_outcome_of_node_0_needs_no_other(nodes, monkeypatch):
    monkeypatch.setattr(restarts, "LOST_SECONDS", 600)
    (verdict,) = nodes.agree({0: Outcome(STOPPED, "a signal", final=True)}).values()
    assert verdict.result(timeout=20) == Verdict(False, "no restart: a signal", STOPPED)


def test_a_run_ends_before_a_node_returns(nodes):
    nodes.set_running()
    waiting = nodes.submit(nodes.add(2).rejoin)
    nodes.agree({0: Outcome(DONE)})
    with pytest.raises(RunError, match="ended before node 2 returned"):
        waiting.result(timeout=20)


def test_a_node_that_has_not_joined_does_not_disturb_the_others(nodes):
    """It may belong to another run."""
    outcome = Outcome(BAD_INPUT, "another seed", final=True)
    assert nodes.launchers[2].agree(outcome) == Verdict(False)
    assert not nodes.launchers[0].exchange(False)


def test_a_node_that_joins_a_restart_gets_the_verdict_on_the_failure_of_another(nodes):
    """Its own ranks are ended because of that failure, before they have joined."""
    assert nodes.launchers[0].exchange(True) and nodes.launchers[2].exchange(False)
    futures = nodes.agree({0: ERROR, 1: ERROR})
    verdict = nodes.launchers[2].agree(Outcome(FAILED, "rank 2 hung"))
    assert verdict.restart and {future.result(timeout=20) for future in futures.values()} == {
        verdict
    }


@pytest.mark.parametrize("joined", [False, True])
def test_a_failure_is_shared_after_the_rendezvous_only(tmp_path, joined):
    if joined:
        (tmp_path / JOINED).touch()
    rank = multiprocessing.get_context("fork").Process(target=os._exit, args=(1,))
    rank.start()
    shared = []
    assert _wait_for({0: rank}, str(tmp_path), lambda failed: shared.append(failed)).code == 1
    assert shared[-1] == joined


def test_the_launch_folder_may_vanish_during_a_run(tmp_path):
    (tmp_path / JOINED).touch()
    rank = multiprocessing.get_context("fork").Process(target=sleep_and_fail)
    rank.start()
    shared = []

    def exchange(failed: bool) -> bool:
        (tmp_path / JOINED).unlink(missing_ok=True)
        shared.append(failed)
        return failed

    outcome = _wait_for({0: rank}, str(tmp_path), exchange)
    assert outcome.joined and shared[0] is False and shared[-1] is True


def sleep_and_fail():
    time.sleep(2)
    os._exit(1)


def test_a_launcher_that_was_started_twice_fails(nodes):
    nodes.set_running()
    with pytest.raises(InputError, match="node 2 has already joined"):
        nodes.add(2).rejoin()
    assert not nodes.launchers[0].exchange(False)  # the run is not disturbed


# Commands


def start_two_ranks(folder: Path, data: Path, output: Path, **changes):
    """Start a launcher with two ranks on one node."""
    folder.mkdir(exist_ok=True)
    return start_spawning(folder, write_config(folder / "c.yaml", data, output, **changes))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, video_set):
    """Return the output folder of two undisturbed ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, _, stderr = finish(
        start_two_ranks(folder, video_set, folder / "out", **TRAINING), END_SECONDS
    )
    assert code == 0, stderr
    return folder / "out"


def ranks_of(launcher) -> list[int]:
    """Return the ranks of a launcher; their DataLoader workers have the same command line."""
    found = []
    for pid in descendants(launcher.pid):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == launcher.pid and "spawn_main" in command_line(pid):
            found.append(pid)
    return found


def assert_same_results(output, undisturbed):
    ours, theirs = (load_checkpoint(folder, LAST) for folder in (output, undisturbed))
    assert same_tensors(ours["model_state"], theirs["model_state"])
    scores = [np.load(folder / "scores.npz")["scores"] for folder in (output, undisturbed)]
    assert np.array_equal(*scores)


def assert_restarted(output, *texts):
    log = (output / "stdout.log").read_text()
    assert log.count("Restart ") == len(texts)
    assert all(text in log for text in texts), log


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_restarted(tmp_path, video_set, undisturbed, victim):
    output = tmp_path / "out"
    run = start_two_ranks(tmp_path, video_set, output, **TRAINING, TRAIN__MAX_RESTARTS=1)
    wait_for(lambda: iterations(output) > 10, START_SECONDS)
    rank = ranks_of(run)[victim]
    # A suspended worker outlives its rank, and still listens on the port of the run's store.
    workers = descendants(rank)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    run.wait(END_SECONDS)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    code, stdout, stderr = finish(run, END_SECONDS)
    assert workers and code == 0, stdout + stderr
    text = (
        f"Restart 1 of 1: rank {victim} was killed by SIGKILL; resuming from {output}/checkpoints/"
    )
    assert_restarted(output, text)
    assert stdout.count(text) == 1
    assert_same_results(output, undisturbed)


@linux_only
@pytest.mark.slow
def test_a_restart_although_nobody_reads_the_output(tmp_path, video_set):
    output = tmp_path / "out"
    run = start_two_ranks(tmp_path, video_set, output, **TRAINING, TRAIN__MAX_RESTARTS=1)
    wait_for(lambda: iterations(output) > 10, START_SECONDS)
    run.stdout.close()
    run.stderr.close()
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    assert run.wait(END_SECONDS) == 0
    assert_restarted(output, "Restart 1 of 1: rank 1 was killed by SIGKILL")


@linux_only
@pytest.mark.slow
def test_code_that_changes_during_a_run_is_not_used_by_a_restart(tmp_path, video_set, monkeypatch):
    module, output = tmp_path / "mine.py", tmp_path / "out"
    module.write_text("RATE = 1\n")
    monkeypatch.setenv(VARIABLE, str(module))
    run = start_two_ranks(tmp_path, video_set, output, **ENDLESS, TRAIN__MAX_RESTARTS=3)
    wait_for(lambda: iterations(output) > 10, START_SECONDS)
    module.write_text("RATE = 2\n")
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    code, _, stderr = finish(run, END_SECONDS)
    assert code == BAD_INPUT and "the imported mine changed" in stderr, stderr


@linux_only
@pytest.mark.slow
def test_a_signal_just_after_a_failure_stops_the_run(tmp_path, video_set):
    """The exit code tells a scheduler to start the command again."""
    output = tmp_path / "out"
    run = start_two_ranks(tmp_path, video_set, output, **ENDLESS, TRAIN__MAX_RESTARTS=3)
    wait_for(lambda: iterations(output) > 10, START_SECONDS)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    os.kill(run.pid, signal.SIGTERM)
    code, _, stderr = finish(run, END_SECONDS)
    assert code == STOPPED, stderr


IGNORE_SIGCHLD = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@linux_only
@pytest.mark.slow
def test_a_parent_that_ignores_sigchld(tmp_path, video_set):
    """The launcher inherits the setting, and could not wait for its ranks."""
    changes = {"TRAIN__MAX_RESTARTS": 1, "DATA_LOADER__NUM_WORKERS": 1}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    run = start(RUN_NET, "--cfg", config, program=("-c", IGNORE_SIGCHLD))
    code, _, stderr = finish(run, END_SECONDS)
    assert code == 0, stderr


@linux_only
@pytest.mark.slow
def test_a_restart_before_the_first_checkpoint(tmp_path, video_set, undisturbed):
    output = tmp_path / "out"
    changes = {**TRAINING, "TRAIN__CHECKPOINT_ITERATIONS": 0, "TRAIN__MAX_RESTARTS": 1}
    run = start_two_ranks(tmp_path, video_set, output, **changes)
    wait_for(lambda: iterations(output) > 10, START_SECONDS)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    code, stdout, stderr = finish(run, END_SECONDS)
    assert code == 0, stdout + stderr
    assert_restarted(output, "resuming from the beginning")
    assert_same_results(output, undisturbed)


@linux_only
@pytest.mark.slow
def test_exhausted_restarts(tmp_path, video_set):
    output = tmp_path / "out"
    run = start_two_ranks(tmp_path, video_set, output, **ENDLESS, TRAIN__MAX_RESTARTS=1)
    for lines in (10, 100):
        wait_for(
            lambda lines=lines: iterations(output) > lines and len(ranks_of(run)) == 2,
            START_SECONDS,
        )
        os.kill(ranks_of(run)[1], signal.SIGKILL)
        time.sleep(1)
    code, _, stderr = finish(run, END_SECONDS)
    assert code == 1
    expected = "error: no restart: TRAIN.MAX_RESTARTS is 1; rank 1 was killed by SIGKILL"
    assert stderr.splitlines()[-1] == expected and "Traceback" not in stderr
    assert_restarted(output, "Restart 1 of 1")


@linux_only
@pytest.mark.slow
def test_a_signal_while_ranks_start_saves_and_stops(tmp_path, video_set):
    """The ranks import PyTorch and do not handle signals yet."""
    run = start_two_ranks(tmp_path, video_set, tmp_path / "out", **ENDLESS)
    wait_for(lambda: len(ranks_of(run)) == 2)
    os.kill(run.pid, signal.SIGTERM)
    code, _, stderr = finish(run, END_SECONDS)
    assert code == STOPPED, stderr


@linux_only
@pytest.mark.slow
def test_a_warning_of_slurm_through_the_launcher_is_no_urgent_signal(tmp_path, video_set):
    """A SIGTERM after the SIGUSR1 does not end the ranks before they have saved."""
    run = start_two_ranks(tmp_path, video_set, tmp_path / "out", **ENDLESS)
    wait_for(lambda: iterations(tmp_path / "out") > 10, START_SECONDS)
    first, suspended = ranks_of(run)
    os.kill(suspended, signal.SIGSTOP)  # the other rank cannot finish its step
    os.kill(run.pid, signal.SIGUSR1)
    time.sleep(2)
    os.kill(first, signal.SIGTERM)
    time.sleep(1)
    os.kill(suspended, signal.SIGCONT)
    code, _, stderr = finish(run, END_SECONDS)
    assert code == STOPPED, stderr


@pytest.mark.slow
def test_one_process_that_fails_again_without_progress(tmp_path, video_set):
    """Its loss is not finite, in the restart, too."""
    output = tmp_path / "out"
    changes = {**ENDLESS, "SOLVER__OPTIMIZING_METHOD": "sgd", "SOLVER__BASE_LR": 1e30}
    changes |= {"TRAIN__MAX_RESTARTS": 5, "TRAIN__CHECKPOINT_ITERATIONS": 0}
    run = start("--cfg", write_config(tmp_path / "c.yaml", video_set, output, **changes))
    code, _, stderr = finish(run, END_SECONDS)
    assert code == 1
    last = stderr.splitlines()[-1]
    assert last.startswith("error: no restart: no progress since the last restart; rank 0: ")
    assert "finite" in last
    assert_restarted(output, "Restart 1 of 5: rank 0: ")


@pytest.mark.slow
def test_bad_input_is_not_restarted(tmp_path, video_set):
    changes = {"TRAIN__BATCH_SIZE": 3, "TRAIN__MAX_RESTARTS": 3}
    code, stdout, stderr = finish(start_two_ranks(tmp_path, video_set, tmp_path / "out", **changes))
    assert code == BAD_INPUT and "Restart" not in stdout
    assert stderr.count("error: ") == 1 and "TRAIN.BATCH_SIZE is 3" in stderr


# Two nodes, each with its own launcher, working directory and rank


class TwoNodes:
    """Two nodes on the loopback interface, or in `namespaces` with one link."""

    def __init__(self, folder: Path, data: Path, namespaces=(), **changes) -> None:
        self._port, self._namespaces = free_port(), namespaces
        self._config = write_config(folder / "c.yaml", data, "out", TRAIN__BATCH_SIZE=2, **changes)
        self._folders = [folder / "node0", folder / "node1"]
        for path in self._folders:
            path.mkdir()
        self.output = self._folders[0] / "out"
        self.nodes = [self.start(node) for node in (0, 1)]

    def start(self, node: int):
        if not self._namespaces:
            return start_node(self._config, node, self._port, folder=self._folders[node])
        name, address = self._namespaces[node], f"tcp://10.213.77.1:{self._port}"
        command = ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name}")
        command += (sys.executable, RUN_NET, "--cfg", self._config, "--num_shards", 2)
        command += ("--shard_id", node, "--init_method", address)
        return start(*command, program=("-c", EXEC), folder=self._folders[node])

    def wait_until_running(self, lines: int = 10) -> None:
        wait_for(lambda: iterations(self.output) > lines, START_SECONDS)

    def finish(self, seconds: float = END_SECONDS) -> list[int]:
        ended = [finish(node, seconds) for node in self.nodes]
        self.stderr = [stderr for _, _, stderr in ended]
        return [code for code, _, _ in ended]


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_restarts_two_nodes(tmp_path, video_set, undisturbed, victim, number):
    run = TwoNodes(tmp_path, video_set, **TRAINING, TRAIN__MAX_RESTARTS=1)
    run.wait_until_running()
    os.kill(ranks_of(run.nodes[victim])[0], number)
    assert run.finish() == [0, 0], run.stderr
    assert_restarted(run.output, "Restart 1 of 1: rank ")
    assert_same_results(run.output, undisturbed)


@linux_only
@pytest.mark.slow
def test_a_node_that_leaves_and_returns(tmp_path, video_set, undisturbed):
    run = TwoNodes(tmp_path, video_set, **TRAINING, TRAIN__MAX_RESTARTS=1)
    run.wait_until_running()
    os.kill(run.nodes[1].pid, signal.SIGKILL)
    kill_group(run.nodes[1])
    run.nodes[1] = run.start(1)
    assert run.finish() == [0, 0], run.stderr
    assert_restarted(run.output, "Restart 1 of 1: ")
    assert_same_results(run.output, undisturbed)


@linux_only
@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_joins_a_restart(tmp_path, video_set, undisturbed):
    run = TwoNodes(tmp_path, video_set, **TRAINING, TRAIN__MAX_RESTARTS=2)
    run.wait_until_running()
    os.kill(ranks_of(run.nodes[0])[0], signal.SIGKILL)
    log = run.output / "stdout.log"
    wait_for(lambda: "Restart 1 " in log.read_text() and ranks_of(run.nodes[1]), START_SECONDS)
    os.kill(ranks_of(run.nodes[1])[0], signal.SIGKILL)
    assert run.finish() == [0, 0], run.stderr
    killed = [f"Restart {i} of 2: rank {i - 1} was killed by SIGKILL" for i in (1, 2)]
    assert_restarted(run.output, *killed)
    assert_same_results(run.output, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["link", "power"])
def test_a_machine_is_lost_and_returns(tmp_path, video_set, undisturbed, what):
    """Its link is down. Without power, its processes are killed, too, and close no connection."""
    if reason := why_no_network_namespaces():
        pytest.skip(reason)
    with linked_namespaces() as names:
        run = TwoNodes(tmp_path, video_set, names, **TRAINING, TRAIN__MAX_RESTARTS=1)
        run.wait_until_running()
        ip("-n", names[1], "link", "set", names[1], "down")
        if what == "link":
            code, _, stderr = finish(run.nodes[1], 60)
            assert code == 1 and "lost the TCP store" in stderr.splitlines()[-1], stderr
        kill_group(run.nodes[1])
        wait_for(lambda: "lost rank 1" in (run.output / "stdout.log").read_text(), START_SECONDS)
        ip("-n", names[1], "link", "set", names[1], "up")
        run.nodes[1] = run.start(1)
        assert run.finish() == [0, 0], run.stderr
    assert_restarted(run.output, "Restart 1 of 1: ")
    assert_same_results(run.output, undisturbed)


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    "number, message",
    [
        (signal.SIGKILL, "error: lost the launcher of node 0"),
        (signal.SIGSTOP, "error: the launcher of node 1 exits: lost the TCP store of the run"),
    ],
)
def test_the_launcher_of_node_0_is_lost(tmp_path, video_set, number, message):
    """It serves the store: the other node exits."""
    run = TwoNodes(tmp_path, video_set, **ENDLESS, TRAIN__MAX_RESTARTS=1)
    run.wait_until_running()
    os.killpg(run.nodes[0].pid, number)
    code, _, stderr = finish(run.nodes[1], 60)
    assert code == 1 and message in stderr, stderr
    kill_group(run.nodes[0])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_is_not_a_failure(tmp_path, video_set, victim):
    run = TwoNodes(tmp_path, video_set, **ENDLESS, TRAIN__MAX_RESTARTS=3)
    run.wait_until_running()
    os.kill(run.nodes[victim].pid, signal.SIGTERM)
    assert run.finish() == [STOPPED, STOPPED], run.stderr
    assert_restarted(run.output)
