"""Faults of processes: killed, signalled, stopped, videos and disk taken away."""

from __future__ import annotations

import os
import random
import signal
import time

from slowfast_lara.engine.signals import SAME_REQUEST_SECONDS
from tests.torture.case import Case
from tests.torture.faults import ONE, SEVERAL, fault
from tests.torture.processes import Started, send
from tests.torture.setting import TEST_VIDEOS

# torchrun has codes of its own.
STOPPED = {"torchrun": {0, 1, 75, -signal.SIGTERM, -signal.SIGINT}}
# A signal may come before the run listens for it.
EARLY = {-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT, 130}


def _codes(case: Case, run: Started, *more: int) -> set[int]:
    early = EARLY if case.out.log_size() == case.beginning.log_start else set()
    return {0, 75, *more} | STOPPED.get(run.launch, set()) | early


@fault("kill -9 of the command", "ending", weight=3)
def kill_main(case: Case, run: Started, rng: random.Random) -> set[int]:
    """Its children have to notice."""
    send([rng.choice(run.mains).pid], signal.SIGKILL)
    return {-signal.SIGKILL} if run.launch != "nodes" else {-signal.SIGKILL, 1}


@fault("kill -9 of everything", "ending", weight=3)
def kill_everything(case: Case, run: Started, rng: random.Random) -> set[int]:
    while pids := run.all_pids():
        send(pids, signal.SIGKILL)
        run.wait(1)
    return {-signal.SIGKILL}


@fault("kill -9 of a rank", "ending", weight=2, launches=("torchrun", "spawn"))
def kill_rank(case: Case, run: Started, rng: random.Random) -> set[int] | None:
    ranks = run.ranks()
    if not ranks:
        return None
    send([rng.choice(ranks)], signal.SIGKILL)
    return {1}


@fault("kill -9 of a worker", "ending", weight=2)
def kill_worker(case: Case, run: Started, rng: random.Random) -> set[int] | None:
    workers = run.workers()
    if not workers:
        return None
    send([rng.choice(workers)], signal.SIGKILL)
    case.mention = "a worker of the loader was killed" if run.launch == "alone" else ""
    return {0, 1}  # 0 if its loader was done


@fault("hang-up", "ending", launches=ONE)
def hang_up(case: Case, run: Started, rng: random.Random) -> set[int]:
    os.killpg(run.mains[0].pid, signal.SIGHUP)
    return {-signal.SIGHUP}


@fault("one signal", "ending", weight=4)
def one_signal(case: Case, run: Started, rng: random.Random) -> set[int]:
    number = rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    if run.launch in ("torchrun", "spawn"):  # which pass it on
        number = signal.SIGTERM
    send([rng.choice(run.mains).pid], number)
    return _codes(case, run)


@fault("a signal to all", "ending", weight=2)
def signal_to_all(case: Case, run: Started, rng: random.Random) -> set[int]:
    """As a terminal or Slurm sends it, to the workers too; perhaps two at once."""
    numbers = rng.sample([signal.SIGTERM, signal.SIGINT], rng.choice([1, 2]))
    for number in numbers:
        send(run.all_pids(), number)
    return _codes(case, run)


@fault("two signals", "ending", weight=2)
def two_signals(case: Case, run: Started, rng: random.Random) -> set[int]:
    for gap in (SAME_REQUEST_SECONDS + rng.uniform(0, 0.4), 0):
        send([run.mains[0].pid], rng.choice([signal.SIGTERM, signal.SIGINT]))
        time.sleep(gap)
    # The other node hears of the first, or loses the one that has ended at the second.
    return _codes(case, run, 130, *([1] if run.launch in SEVERAL else []))


@fault("stalled workers and a signal", "ending", weight=2, launches=ONE)
def stalled_workers(case: Case, run: Started, rng: random.Random) -> set[int] | None:
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


@fault("a rank is stopped", "ending", launches=SEVERAL)
def stop_rank(case: Case, run: Started, rng: random.Random) -> set[int] | None:
    """The others notice; then it goes on, alone, or is killed."""
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


@fault("the videos go away", "ending", weight=2)
def videos_go_away(case: Case, run: Started, rng: random.Random) -> set[int]:
    elsewhere = case.data / "elsewhere"
    case.videos.rename(elsewhere)
    # What a test cannot read is told in its results.
    case.broken_tests = {f"test{number}.mp4" for number in range(TEST_VIDEOS)}
    case.best_may_differ = True
    case.mention = "decode" if run.launch == "alone" else ""
    case.undo.append(case.broken_tests.clear)
    case.undo.append(lambda: elsewhere.rename(case.videos))
    return {0, 1}


@fault("nothing: it is left alone", "ending", weight=1)
def left_alone(case: Case, run: Started, rng: random.Random) -> set[int]:
    return {0}


# It goes on.


@fault("all stopped and continued", "during", weight=2)
def pause_all(case: Case, run: Started, rng: random.Random) -> bool:
    send(run.all_pids(), signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 3))
    send(run.all_pids(), signal.SIGCONT)
    return True


@fault("a worker stopped and continued", "during")
def pause_worker(case: Case, run: Started, rng: random.Random) -> bool:
    return _pause_one(run.workers(), rng, 0.2, 2)


@fault("a rank stopped and continued", "during", launches=SEVERAL)
def pause_rank(case: Case, run: Started, rng: random.Random) -> bool:
    """For less than the half minute after which it is given up."""
    return _pause_one(run.ranks(), rng, 0.5, 6)


def _pause_one(pids: list[int], rng: random.Random, least: float, most: float) -> bool:
    """Stop one of the processes for so many seconds; False if there is none."""
    if not pids:
        return False
    victim = rng.choice(pids)
    send([victim], signal.SIGSTOP)
    time.sleep(rng.uniform(least, most))
    send([victim], signal.SIGCONT)
    return True


@fault("a second run in the folder", "during", weight=1.5)
def second_run(case: Case, run: Started, rng: random.Random) -> bool:
    """The first is stopped meanwhile, so that it cannot end and make room."""
    send(run.all_pids(), signal.SIGSTOP)
    if not (case.out.path / ".lock").exists():  # it has not come so far, or is about to leave
        send(run.all_pids(), signal.SIGCONT)
        return False
    beginning = case.beginning
    case.refused("in use by another run")
    case.beginning = beginning
    send(run.all_pids(), signal.SIGCONT)
    return True
