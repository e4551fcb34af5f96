"""Faults between nodes: different configs, a missing node, a cut link."""

from __future__ import annotations

import random

from tests.helpers.isolation import ip, linked_namespaces
from tests.torture.case import Case, draw_start, draw_trigger
from tests.torture.faults import fault
from tests.torture.faults_refused import KEYS
from tests.torture.run_folder import Trigger

TWO_RANKS = ("two", "mixed")


@fault("nodes with different keys", "whole", modes=TWO_RANKS)
def nodes_with_different_keys(case: Case, rng: random.Random) -> str:
    key, value = rng.choice(sorted(KEYS.items(), key=lambda item: item[0]))
    value = str(value).replace(" ", "")
    before = case.out.snapshot()
    odd = rng.randrange(2)
    run = case.start("nodes", by_node=lambda node: (key, value) if node == odd else ())
    ended = case.finish(run, {2})
    for text in run.stderr_texts():
        if key not in text:
            case.violations.append(f"{key} is not named in {text!r:.1000}")
    if case.out.snapshot() != before:
        case.violations.append("a refused run changed the folder")
    return ended


@fault("missing node", "whole", modes=TWO_RANKS, weight=0.5)
def missing_node(case: Case, rng: random.Random) -> str:
    _, changes = draw_start(case, rng)
    run = case.start("nodes", {**changes, "global batch": 2, "DIST_TIMEOUT": 8})
    lost = run.mains[rng.randrange(2)]
    lost.kill()
    return case.finish(run, {1, -9})


@fault("cut link", "whole", modes=TWO_RANKS, weight=0.7, needs="networks")
def cut_link(case: Case, rng: random.Random) -> str:
    """The link between two nodes; both must detect the loss."""
    trigger: Trigger = draw_trigger(rng, "nodes")
    side = rng.randrange(2)
    with linked_namespaces() as names:

        def prefix(node: int) -> tuple[str, ...]:
            name = names[node]
            return ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={name}")

        run = case.start("nodes", prefix=prefix, host="10.213.77.1")
        cut = case.reach(run, trigger)
        if cut:
            ip("-n", names[side], "link", "set", names[side], "down")
        return case.finish(run, {0, 1} if cut else {0})
