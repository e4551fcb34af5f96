"""Killed, signalled and suspended processes, removed videos, a second run."""

from __future__ import annotations

import os
import random
import signal
import time

from slowfast_lara.engine.signals import SAME_REQUEST_SECONDS
from tests.torture.case import Case
from tests.torture.faults import ONE, SEVERAL, fault
from tests.torture.processes import StartedRun, send, suspend
from tests.torture.workload import TEST_VIDEOS

# torchrun has its own exit codes.
STOPPED = {"torchrun": {0, 1, 75, -signal.SIGTERM, -signal.SIGINT}}
# 0 if the run had ended before the signal.
KILLED = {0, -signal.SIGKILL}
# A signal may arrive before the run handles it.
EARLY = {-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT, 130}


def _codes(case: Case, run: StartedRun, *more: int) -> set[int]:
    early = EARLY if case.out.log_size() == case.start_state.log_start else set()
    return {0, 75, *more} | STOPPED.get(run.launch, set()) | early


@fault("SIGKILL to the command", "ending", weight=3)
def kill_main(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    """Its children must exit too."""
    send([rng.choice(run.mains).pid], signal.SIGKILL)
    return KILLED if run.launch != "nodes" else {*KILLED, 1}


@fault("SIGKILL to all processes", "ending", weight=3)
def kill_everything(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    while pids := run.all_pids():
        send(pids, signal.SIGKILL)
        run.wait(1)
    return KILLED


@fault("SIGKILL to a rank", "ending", weight=2, launches=("torchrun", "spawn"))
def kill_rank(case: Case, run: StartedRun, rng: random.Random) -> set[int] | None:
    ranks = run.ranks()
    if not ranks:
        return None
    send([rng.choice(ranks)], signal.SIGKILL)
    return {1}


@fault("SIGKILL to a worker", "ending", weight=2)
def kill_worker(case: Case, run: StartedRun, rng: random.Random) -> set[int] | None:
    workers = run.workers()
    if not workers:
        return None
    send([rng.choice(workers)], signal.SIGKILL)
    case.expected_text = "worker" if run.launch == "alone" else ""
    return {0, 1}  # 0 if its loader was exhausted


@fault("SIGHUP", "ending", launches=ONE)
def hang_up(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    os.killpg(run.mains[0].pid, signal.SIGHUP)
    return {-signal.SIGHUP}


@fault("one signal", "ending", weight=4)
def one_signal(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    if run.launch in ("torchrun", "spawn"):  # they forward SIGTERM to their ranks
        number = signal.SIGTERM
    send([rng.choice(run.mains).pid], number)
    return _codes(case, run)


@fault("signal to all processes", "ending", weight=2)
def signal_to_all(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    """As a terminal or Slurm does, workers included; one signal, or two at once."""
    numbers = rng.sample([signal.SIGTERM, signal.SIGINT], rng.choice([1, 2]))
    for number in numbers:
        send(run.all_pids(), number)
    return _codes(case, run)


@fault("two signals", "ending", weight=2)
def two_signals(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    for gap in (SAME_REQUEST_SECONDS + rng.uniform(0, 0.4), 0):
        send([run.mains[0].pid], rng.choice([signal.SIGTERM, signal.SIGINT]))
        time.sleep(gap)
    # The other node receives the first request, or loses its peer at the second.
    return _codes(case, run, 130, *([1] if run.launch in SEVERAL else []))


@fault("suspended workers and a signal", "ending", weight=2, launches=ONE)
def suspended_workers(case: Case, run: StartedRun, rng: random.Random) -> set[int] | None:
    workers = run.workers()
    if not workers:
        return None
    twice = rng.random() < 0.5
    send(workers, signal.SIGSTOP)
    time.sleep(rng.uniform(0, 1))
    send([run.mains[0].pid], signal.SIGTERM)
    if twice:
        time.sleep(SAME_REQUEST_SECONDS + 0.2)
        send([run.mains[0].pid], signal.SIGTERM)
    return _codes(case, run, *([130] if twice else []))


@fault("suspended rank", "ending", launches=SEVERAL)
def stop_rank(case: Case, run: StartedRun, rng: random.Random) -> set[int] | None:
    """The other ranks detect the loss; then the suspended one is continued or killed."""
    ranks = run.ranks()
    if len(ranks) < 2:
        return None
    victim, number = rng.choice(ranks), rng.choice([signal.SIGCONT, signal.SIGKILL])
    send([victim], signal.SIGSTOP)
    others = [main for main in run.mains if main.pid != victim]
    deadline = time.monotonic() + 90
    while any(other.poll() is None for other in others) and time.monotonic() < deadline:
        time.sleep(0.05)
    send([victim], number)
    return {0, 1, -signal.SIGKILL}


@fault("removed videos", "ending", weight=2)
def removed_videos(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    elsewhere = case.data / "elsewhere"
    case.videos.rename(elsewhere)
    # A test lists unreadable videos in its results.
    case.broken_tests = {f"test{number}.mp4" for number in range(TEST_VIDEOS)}
    case.best_may_differ = True
    # "videos do not decode" in training, "none of 24 test videos could be scored" in a test.
    case.expected_text = "videos" if run.launch == "alone" else ""
    case.undo.append(case.broken_tests.clear)
    case.undo.append(lambda: elsewhere.rename(case.videos))
    return {0, 1}


@fault("no fault", "ending", weight=1)
def no_fault(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    return {0}


# Faults after which the run continues


@fault("all suspended and continued", "during", weight=2)
def pause_all(case: Case, run: StartedRun, rng: random.Random) -> bool:
    send(run.all_pids(), signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 3))
    send(run.all_pids(), signal.SIGCONT)
    return True


@fault("worker suspended and continued", "during")
def pause_worker(case: Case, run: StartedRun, rng: random.Random) -> bool:
    return _pause_one(run.workers(), rng, 0.2, 2)


@fault("rank suspended and continued", "during", launches=SEVERAL)
def pause_rank(case: Case, run: StartedRun, rng: random.Random) -> bool:
    """For less than the half minute after which it counts as lost."""
    return _pause_one(run.ranks(), rng, 0.5, 6)


def _pause_one(pids: list[int], rng: random.Random, least: float, most: float) -> bool:
    """Suspend and continue a random process; return False without processes."""
    if not pids:
        return False
    victim = rng.choice(pids)
    send([victim], signal.SIGSTOP)
    time.sleep(rng.uniform(least, most))
    send([victim], signal.SIGCONT)
    return True


@fault("second run in the folder", "during", weight=1.5)
def second_run(case: Case, run: StartedRun, rng: random.Random) -> bool:
    """The first run is suspended meanwhile, so that it cannot end and release the lock."""
    pids = run.all_pids()
    suspend(pids)
    if case.out.lock_holder() not in pids:  # not locked yet, or about to exit
        send(run.all_pids(), signal.SIGCONT)
        return False
    start_state = case.start_state
    case.refused("OUTPUT_DIR")
    case.start_state = start_state
    send(run.all_pids(), signal.SIGCONT)
    return True
