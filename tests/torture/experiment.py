"""Random plan of an experiment, and its execution."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture import (  # noqa: F401  # registers its faults
    faults_files,
    faults_refused,
    faults_resources,
    faults_restarts,
    faults_several,
    faults_signals,
)
from tests.torture.case import MODES, Case, draw_start, draw_trigger
from tests.torture.faults import FAULTS, Fault
from tests.torture.run_folder import PHASES
from tests.torture.workload import Reference

NOT_APPLIED = "not applied"
LAST_RUN_SECONDS = 240


@dataclass
class Report:
    """Exit codes by kind of fault, and violations by experiment."""

    ended: dict[str, Counter[str]] = field(default_factory=dict)
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, kind: str, end: str) -> None:
        self.ended.setdefault(kind, Counter())[end] += 1

    def faults(self) -> int:
        return sum(
            count
            for counts in self.ended.values()
            for end, count in counts.items()
            if end != NOT_APPLIED
        )


@dataclass(frozen=True)
class Plan:
    """The mode of an experiment, and the faults of each run."""

    mode: str
    runs: list[list[Fault]]


def draw_plan(seed: int, number: int, allowed: set[str], only: str | None) -> Plan:
    rng = random.Random(f"{seed} {number}")
    faults = [fault for fault in FAULTS.values() if fault.needs in allowed]
    if only:
        faults = [fault for fault in faults if fault.kind == only]
    modes = [mode for mode in MODES if any(mode in fault.modes for fault in faults)]
    weights = {"alone": 6, "two": 2, "mixed": 2}
    mode = rng.choices(modes, [weights[mode] for mode in modes])[0]
    faults = [fault for fault in faults if mode in fault.modes and _is_possible(fault, mode)]
    return Plan(mode, [_draw_run(faults, rng) for _ in range(rng.randint(6, 10))])


def _is_possible(fault: Fault, mode: str) -> bool:
    return bool(set(fault.launches) & set(MODES[mode]))


def _draw_run(faults: list[Fault], rng: random.Random) -> list[Fault]:
    """Draw either one "whole" fault, or a combination of the other stages."""
    by_stage: dict[str, list[Fault]] = {}
    for fault in faults:
        by_stage.setdefault(fault.stage, []).append(fault)
    if "whole" in by_stage and (len(by_stage) == 1 or rng.random() < 0.35):
        return _choose(by_stage["whole"], rng)
    chosen = []
    for stage, chance in (("before", 0.6), ("during", 0.5), ("ending", 1.0)):
        if stage in by_stage and (len(by_stage) == 1 or rng.random() < chance):
            chosen += _choose(by_stage[stage], rng)
    return chosen


def _choose(faults: list[Fault], rng: random.Random) -> list[Fault]:
    return rng.choices(faults, [fault.weight for fault in faults])


def run_experiment(
    seed: int,
    number: int,
    plan: Plan,
    folder: Path,
    videos: Path,
    reference: Reference | None,
    report: Report,
    *,
    disk: bool,
    is_over: Callable[[], bool],
    log: Callable[[str], None],
) -> list[str]:
    """Execute a plan and a last, undisturbed run; return the violations."""
    case = Case(plan.mode, folder, videos, reference, disk=disk)
    failed = True
    try:
        for i, faults in enumerate(plan.runs):
            if is_over():
                break
            started, before = time.monotonic(), len(case.violations)
            ended = _run_with_faults(case, faults, random.Random(f"{seed} {number} {i}"), report)
            case.restore()
            mark = "  VIOLATION" if len(case.violations) > before else ""
            kinds = " + ".join(fault.kind for fault in faults)
            seconds = time.monotonic() - started
            log(f"{number}.{i} {plan.mode}: {kinds} -> {ended} ({seconds:.0f} s){mark}")
            for problem in case.violations[before:]:
                log(f"  {problem:.3000}")
        launch = MODES[plan.mode][0]
        case.finish(case.start(launch), {0}, seconds=LAST_RUN_SECONDS)
        case.check_end()
        failed = False
    except Exception:
        case.violations.append(f"the fault injection itself failed: {traceback.format_exc()}")
    finally:
        case.close(keep=failed or bool(case.violations))
    return case.violations


def _run_with_faults(case: Case, faults: list[Fault], rng: random.Random, report: Report) -> str:
    """Run once with the given faults; return how it ended."""
    if faults[0].stage == "whole":
        ended = faults[0].inject(case, rng) or NOT_APPLIED
        report.add(faults[0].kind, ended)
        return ended
    by_stage = {fault.stage: fault for fault in faults}
    decisive = by_stage.get("ending") or faults[-1]
    launch, changes = draw_start(case, rng, decisive.launches)
    applied = []
    if fault := by_stage.get("before"):
        applied.append((fault.kind, fault.inject(case, rng)))
    # Always drawn, so that later draws do not depend on the progress of the run.
    triggers = sorted(
        (draw_trigger(rng, launch) for _ in range(2)),
        key=lambda trigger: (PHASES.index(trigger.phase), trigger.times),
    )
    run = case.start(launch, changes)
    allowed = {0}
    if fault := by_stage.get("during"):
        reached = case.reach(run, triggers[0]) and launch in fault.launches
        applied.append((fault.kind, reached and fault.inject(case, run, rng)))
    if fault := by_stage.get("ending"):
        reached = launch in fault.launches and case.reach(run, triggers[1])
        codes = fault.inject(case, run, rng) if reached else None
        applied.append((fault.kind, codes is not None))
        allowed = codes or allowed
    ended = case.finish(run, allowed, seconds=LAST_RUN_SECONDS)
    for kind, was_applied in applied:
        report.add(kind, ended if was_applied else NOT_APPLIED)
    missed = [kind for kind, was_applied in applied if not was_applied]
    return f"{ended} ({NOT_APPLIED}: {', '.join(missed)})" if missed else ended
