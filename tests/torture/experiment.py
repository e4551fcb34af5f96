"""The plan of an experiment, drawn from the seed, and carrying it out."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.torture import (  # noqa: F401  # each adds its faults to the list
    faults_files,
    faults_refused,
    faults_resources,
    faults_several,
    faults_signals,
)
from tests.torture.case import WAYS, Case, draw_moment, draw_start
from tests.torture.faults import FAULTS, Fault
from tests.torture.folder import PHASES
from tests.torture.processes import Started
from tests.torture.setting import Reference

NOT_APPLIED = "not applied"
LONGEST = 240


@dataclass
class Report:
    """How the faults of experiments ended, by kind, and what did not hold."""

    ended: dict[str, Counter[str]] = field(default_factory=dict)
    violations: dict[int, list[str]] = field(default_factory=dict)

    def add(self, kind: str, how: str) -> None:
        self.ended.setdefault(kind, Counter())[how] += 1

    def faults(self) -> int:
        return sum(
            count
            for counts in self.ended.values()
            for how, count in counts.items()
            if how != NOT_APPLIED
        )


@dataclass(frozen=True)
class Plan:
    """A kind of experiment, and for each run the faults that it meets."""

    way: str
    runs: list[list[Fault]]


def draw_plan(seed: int, number: int, allowed: set[str], only: str | None) -> Plan:
    rng = random.Random(f"{seed} {number}")
    faults = [fault for fault in FAULTS.values() if fault.needs in allowed]
    if only:
        faults = [fault for fault in faults if fault.kind == only]
    ways = [way for way in WAYS if any(way in fault.ways for fault in faults)]
    weights = {"alone": 6, "two": 2, "mixed": 2}
    way = rng.choices(ways, [weights[way] for way in ways])[0]
    faults = [fault for fault in faults if way in fault.ways and _can_be(fault, way)]
    return Plan(way, [_draw_run(faults, rng) for _ in range(rng.randint(6, 10))])


def _can_be(fault: Fault, way: str) -> bool:
    return bool(set(fault.launches) & set(WAYS[way]))


def _draw_run(faults: list[Fault], rng: random.Random) -> list[Fault]:
    """Either one fault that is a run by itself, or some that come together in one."""
    by_sort: dict[str, list[Fault]] = {}
    for fault in faults:
        by_sort.setdefault(fault.sort, []).append(fault)
    if "whole" in by_sort and (len(by_sort) == 1 or rng.random() < 0.35):
        return _choose(by_sort["whole"], rng)
    chosen = []
    for sort, chance in (("before", 0.6), ("during", 0.5), ("ending", 1.0)):
        if sort in by_sort and (len(by_sort) == 1 or rng.random() < chance):
            chosen += _choose(by_sort[sort], rng)
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
    over: Callable[[], bool],
    tell: Callable[[str], None],
) -> list[str]:
    """Carry out a plan, then let it end undisturbed; what did not hold."""
    case = Case(plan.way, folder, videos, reference, disk=disk)
    broken = True
    try:
        for i, faults in enumerate(plan.runs):
            if over():
                break
            started, before = time.monotonic(), len(case.violations)
            ended = _attack(case, faults, random.Random(f"{seed} {number} {i}"), report)
            case.restore()
            mark = "  VIOLATION" if len(case.violations) > before else ""
            kinds = " + ".join(fault.kind for fault in faults)
            seconds = time.monotonic() - started
            tell(f"{number}.{i} {plan.way}: {kinds} -> {ended} ({seconds:.0f} s){mark}")
            for problem in case.violations[before:]:
                tell(f"  {problem:.3000}")
        launch = WAYS[plan.way][0]
        case.finish(case.start(launch), {0}, seconds=LONGEST)
        case.look_at_end()
        broken = False
    except Exception:
        case.violations.append(f"the attack itself failed: {traceback.format_exc()}")
    finally:
        case.close(keep=broken or bool(case.violations))
    return case.violations


def _attack(case: Case, faults: list[Fault], rng: random.Random, report: Report) -> str:
    """One run, with all that happens to it; how it ended."""
    if faults[0].sort == "whole":
        ended = faults[0].strike(case, rng) or NOT_APPLIED
        report.add(faults[0].kind, ended)
        return ended
    by_sort = {fault.sort: fault for fault in faults}
    decides = by_sort.get("ending") or faults[-1]
    launch, changes = draw_start(case, rng, decides.launches)
    applied = []
    if fault := by_sort.get("before"):
        applied.append((fault.kind, fault.strike(case, rng)))
    # Drawn in any case, so that what follows does not depend on how far the run comes.
    moments = sorted(
        (draw_moment(rng, launch) for _ in range(2)),
        key=lambda moment: (PHASES.index(moment.phase), moment.times),
    )
    run = case.start(launch, changes)
    allowed = {0}
    if fault := by_sort.get("during"):
        applied.append((fault.kind, _disturb(case, run, fault, rng, case.reach(run, moments[0]))))
    if fault := by_sort.get("ending"):
        there = launch in fault.launches and case.reach(run, moments[1])
        codes = fault.strike(case, run, rng) if there else None
        applied.append((fault.kind, codes is not None))
        allowed = codes or allowed
    ended = case.finish(run, allowed, seconds=LONGEST)
    for kind, was in applied:
        report.add(kind, ended if was else NOT_APPLIED)
    missed = [kind for kind, was in applied if not was]
    return f"{ended} ({NOT_APPLIED}: {', '.join(missed)})" if missed else ended


def _disturb(case: Case, run: Started, fault: Fault, rng: random.Random, there: bool) -> bool:
    return there and run.launch in fault.launches and fault.strike(case, run, rng)
