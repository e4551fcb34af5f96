"""Faults between the processes of a run: what differs, who does not come, a cut link."""

from __future__ import annotations

import random

from tests.engine.test_heartbeat import ip, linked_namespaces
from tests.torture.case import Case, draw_moment, draw_start
from tests.torture.faults import fault
from tests.torture.faults_refused import KEYS
from tests.torture.folder import Moment

MANY = ("two", "mixed")


@fault("nodes that differ", "whole", ways=MANY)
def nodes_that_differ(case: Case, rng: random.Random) -> str:
    key, value = rng.choice(sorted(KEYS.items(), key=lambda item: item[0]))
    value = str(value).replace(" ", "")
    before = case.out.snapshot()
    odd = rng.randrange(2)
    run = case.start("nodes", by_node=lambda node: (key, value) if node == odd else ())
    ended = case.finish(run, {2})
    for said in run.said():
        if f"{key} is " not in said:
            case.violations.append(f"{key} is not named in {said!r:.1000}")
    if case.out.snapshot() != before:
        case.violations.append("a run that was refused has changed the folder")
    return ended


@fault("a node that does not come", "whole", ways=MANY, weight=0.5)
def node_that_does_not_come(case: Case, rng: random.Random) -> str:
    _, changes = draw_start(case, rng)
    run = case.start("nodes", {**changes, "global batch": 2, "DIST_TIMEOUT": 8})
    lost = run.mains[rng.randrange(2)]
    lost.kill()
    return case.finish(run, {1, -9})


@fault("a cut link", "whole", ways=MANY, weight=0.7, needs="networks")
def cut_link(case: Case, rng: random.Random) -> str:
    """Between two machines, which both have to notice."""
    moment: Moment = draw_moment(rng, "nodes")
    side = rng.randrange(2)
    with linked_namespaces() as names:

        def inside(node: int) -> tuple[str, ...]:
            name = names[node]
            return ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name}")

        run = case.start("nodes", prefix=inside, host="10.213.77.1")
        cut = case.reach(run, moment)
        if cut:
            ip("-n", names[side], "link", "set", names[side], "down")
        return case.finish(run, {0, 1} if cut else {0})
