"""Faults of the machine: a full disk, small files, little shared memory, nobody who reads."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from pathlib import Path

from tests.engine.test_ending import small_shm
from tests.torture.case import Case, draw_moment, draw_start
from tests.torture.faults import fault
from tests.torture.folder import Moment
from tests.torture.processes import Started, send


def _fill(case: Case, left: int) -> None:
    """Leave so many bytes on the disk."""
    assert case.disk is not None
    filler: Path = case.disk / "filler"
    block = bytes(1 << 16)
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(block)
        except OSError as error:
            assert error.errno == errno.ENOSPC
        os.truncate(filler, max(0, file.tell() - left))
    case.undo.append(lambda: filler.unlink(missing_ok=True))


@fault("the disk becomes full", "ending", weight=2, needs="mounts")
def disk_becomes_full(case: Case, run: Started, rng: random.Random) -> set[int]:
    _fill(case, rng.choice([0, 4096, 50_000, 200_000, 1_000_000]))
    case.mention = str(case.out.path) if run.launch == "alone" else ""  # of a file there
    return {0, 1}


@fault("the disk is full", "whole", needs="mounts")
def disk_is_full(case: Case, rng: random.Random) -> str:
    launch, changes = draw_start(case, rng)
    case.out.path.mkdir(exist_ok=True)
    _fill(case, rng.choice([0, 4096, 16_384, 50_000]))
    return case.finish(case.start(launch, changes), {0, 1, 2})


@fault("small files only", "whole", ways=("alone", "mixed"))
def small_files(case: Case, rng: random.Random) -> str:
    _, changes = draw_start(case, rng)
    most = rng.choice([3_000, 50_000, 300_000, 700_000])  # its stderr is a file too
    run = case.start("alone", changes, limits={resource.RLIMIT_FSIZE: most})
    return case.finish(run, {0, 1, 2})


@fault("little shared memory", "whole", needs="mounts", ways=("alone", "mixed"))
def little_shared_memory(case: Case, rng: random.Random) -> str:
    changes = {"DATA_LOADER__NUM_WORKERS": rng.choice([1, 2])}
    size = rng.choice(["8k", "64k"])
    case.mention = "no room in the shared memory /dev/shm"
    run = case.start("alone", changes, prefix=lambda node: small_shm(size))
    return case.finish(run, {1})


@fault("nobody reads stdout", "whole", ways=("alone", "mixed"))
def nobody_reads(case: Case, rng: random.Random) -> str:
    """As after `| head`: the run goes on, or ends in one line."""
    _, changes = draw_start(case, rng)
    moment = draw_moment(rng, "nodes")
    reading, writing = os.pipe()
    run = case.start("alone", changes, stdout=writing)
    for end in (reading, writing):
        os.close(end)
    if case.reach(run, moment):
        send([run.mains[0].pid], signal.SIGTERM)
    return case.finish(run, {0, 2, 75})


@fault("another test in between", "whole")
def another_test(case: Case, rng: random.Random) -> str | None:
    """With fewer views: what it leaves is not to be taken for scores of the other one."""
    moment, kill = Moment("test", rng.randint(1, 10), 0), rng.random() < 0.7
    if case.newest() is None:
        return None
    case.other_scores = True
    run = case.start("alone", {"TRAIN__ENABLE": False, "TEST__NUM_ENSEMBLE_VIEWS": 1})
    killed = case.reach(run, moment) and kill
    if killed:
        send(run.all_pids(), signal.SIGKILL)
    return case.finish(run, {0, -signal.SIGKILL} if killed else {0})
