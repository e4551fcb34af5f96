"""Lost ranks of a run with TRAIN.MAX_RESTARTS: it restarts them and ends as if undisturbed."""

from __future__ import annotations

import random
import signal

from tests.torture.case import Case, draw_start, draw_trigger
from tests.torture.faults import fault
from tests.torture.processes import send
from tests.torture.run_folder import RESTART

SECONDS = 300  # a suspended rank is lost after half a minute, and killed half a minute later


@fault("restart after SIGKILL", "whole", weight=2)
def restart_after_kill(case: Case, rng: random.Random) -> str | None:
    return _restart(case, rng, signal.SIGKILL, ("alone", "nodes", "spawn"))


@fault("restart after suspension", "whole", modes=("two", "mixed"))
def restart_after_suspension(case: Case, rng: random.Random) -> str | None:
    return _restart(case, rng, signal.SIGSTOP, ("nodes", "spawn"))


def _restart(
    case: Case, rng: random.Random, number: signal.Signals, launches: tuple[str, ...]
) -> str | None:
    """Send a signal to one rank; return the exit codes, None if the run was already over."""
    launch, changes = draw_start(case, rng, launches)
    trigger = draw_trigger(rng, "nodes")
    run = case.start(launch, {**changes, "TRAIN__MAX_RESTARTS": 2})
    ranks = run.ranks() if case.reach(run, trigger) else []
    if ranks:
        send([rng.choice(ranks)], number)
    ended = case.finish(run, {0}, seconds=SECONDS)
    restarted = RESTART in case.out.log(case.start_state.log_start)
    if ranks and not restarted:
        case.violations.append(f"a rank received {number.name}, but no restart was logged")
    return ended if restarted else None
