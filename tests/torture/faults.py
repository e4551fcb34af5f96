"""Registry of faults. The stage of a fault determines the signature of its function:

`before`  changes files before a run starts: (case, rng) -> applied
`during`  disturbs a run that must continue: (case, run, rng) -> applied
`ending`  ends a run: (case, run, rng) -> the allowed exit codes, None if not applied
`whole`   runs from start to end: (case, rng) -> how it ended, None if not applied
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.helpers.isolation import can_limit_shm, why_no_network_namespaces

STAGES = ("before", "during", "ending", "whole")
ONE = ("alone",)
SEVERAL = ("nodes", "torchrun", "spawn")
ANY = (*ONE, *SEVERAL)


@dataclass(frozen=True)
class Fault:
    kind: str
    stage: str
    inject: Callable[..., Any]
    weight: float
    launches: tuple[str, ...]  # launchers of the runs that it applies to
    modes: tuple[str, ...]  # modes of the experiments that it applies to
    needs: str


FAULTS: dict[str, Fault] = {}


def fault(
    kind: str,
    stage: str,
    *,
    weight: float = 1,
    launches: tuple[str, ...] = ANY,
    modes: tuple[str, ...] = ("alone", "two", "mixed"),
    needs: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a fault."""

    def add(inject: Callable[..., Any]) -> Callable[..., Any]:
        assert stage in STAGES and kind not in FAULTS
        FAULTS[kind] = Fault(kind, stage, inject, weight, launches, modes, needs)
        return inject

    return add


def available_privileges() -> set[str]:
    """Return the values of `Fault.needs` that this machine can provide."""
    privileges = {""}
    if sys.platform.startswith("linux") and can_limit_shm():
        privileges.add("mounts")
    if shutil.which("ip") and not why_no_network_namespaces():
        privileges.add("networks")
    return privileges
