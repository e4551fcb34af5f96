"""The list of faults, to which the other files add theirs.

`before`  changes files, and a run that is then started must cope: (case, rng) -> applied
`during`  disturbs a run that must go on: (case, run, rng) -> applied
`ending`  ends a run: (case, run, rng) -> the exit codes that are right, None if not applied
`whole`   a run from start to end: (case, rng) -> how it ended, None if not applied
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engine.test_ending import shm_can_be_made_small
from tests.engine.test_heartbeat import why_no_namespaces

SORTS = ("before", "during", "ending", "whole")
ONE = ("alone",)
SEVERAL = ("nodes", "torchrun", "spawn")
ANY = (*ONE, *SEVERAL)


@dataclass(frozen=True)
class Fault:
    kind: str
    sort: str
    strike: Callable[..., Any]
    weight: float
    launches: tuple[str, ...]  # of the run that it ends or disturbs
    ways: tuple[str, ...]  # of the experiments in which it can be
    needs: str


FAULTS: dict[str, Fault] = {}


def fault(
    kind: str,
    sort: str,
    *,
    weight: float = 1,
    launches: tuple[str, ...] = ANY,
    ways: tuple[str, ...] = ("alone", "two", "mixed"),
    needs: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the list."""

    def add(strike: Callable[..., Any]) -> Callable[..., Any]:
        assert sort in SORTS and kind not in FAULTS
        FAULTS[kind] = Fault(kind, sort, strike, weight, launches, ways, needs)
        return strike

    return add


def what_this_machine_allows() -> set[str]:
    """Of what faults need."""
    allowed = {""}
    if sys.platform.startswith("linux") and shm_can_be_made_small():
        allowed.add("mounts")
    if shutil.which("ip") and not why_no_namespaces():
        allowed.add("networks")
    return allowed
