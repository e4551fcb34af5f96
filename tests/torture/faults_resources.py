"""Full disks, file size limits, small shared memory, closed stdout, other tests."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from pathlib import Path

from tests.helpers.isolation import small_shm
from tests.torture.case import Case, draw_start, draw_trigger
from tests.torture.faults import fault
from tests.torture.processes import StartedRun, send
from tests.torture.run_folder import Trigger


def _fill(case: Case, left: int) -> None:
    """Fill the disk except for `left` bytes."""
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


@fault("disk becomes full", "ending", weight=2, needs="mounts")
def disk_becomes_full(case: Case, run: StartedRun, rng: random.Random) -> set[int]:
    _fill(case, rng.choice([0, 4096, 50_000, 200_000, 1_000_000]))
    # The error names a file in the output folder.
    case.expected_text = str(case.out.path) if run.launch == "alone" else ""
    return {0, 1}


@fault("disk is full", "whole", needs="mounts")
def disk_is_full(case: Case, rng: random.Random) -> str:
    launch, changes = draw_start(case, rng)
    case.out.path.mkdir(exist_ok=True)
    _fill(case, rng.choice([0, 4096, 16_384, 50_000]))
    return case.finish(case.start(launch, changes), {0, 1, 2})


@fault("file size limit", "whole", modes=("alone", "mixed"))
def file_size_limit(case: Case, rng: random.Random) -> str:
    _, changes = draw_start(case, rng)
    limit = rng.choice([3_000, 50_000, 300_000, 700_000])  # stderr is a file too
    run = case.start("alone", changes, limits={resource.RLIMIT_FSIZE: limit})
    return case.finish(run, {0, 1, 2})


@fault("small shared memory", "whole", needs="mounts", modes=("alone", "mixed"))
def small_shared_memory(case: Case, rng: random.Random) -> str:
    changes = {"DATA_LOADER__NUM_WORKERS": rng.choice([1, 2])}
    size = rng.choice(["8k", "64k"])
    case.expected_text = "/dev/shm"
    run = case.start("alone", changes, prefix=lambda node: small_shm(size))
    return case.finish(run, {1})


@fault("closed stdout", "whole", modes=("alone", "mixed"))
def closed_stdout(case: Case, rng: random.Random) -> str:
    """As after `| head`: the run continues, or fails with one line."""
    _, changes = draw_start(case, rng)
    trigger = draw_trigger(rng, "nodes")
    reading, writing = os.pipe()
    run = case.start("alone", changes, stdout=writing)
    for end in (reading, writing):
        os.close(end)
    if case.reach(run, trigger):
        send([run.mains[0].pid], signal.SIGTERM)
    return case.finish(run, {0, 2, 75})


@fault("another test in the folder", "whole")
def another_test(case: Case, rng: random.Random) -> str | None:
    """A test with fewer views, whose scores the regular test must not use."""
    trigger, kill = Trigger("test", rng.randint(1, 10), 0), rng.random() < 0.7
    if case.newest() is None:
        return None
    case.other_scores = True
    run = case.start("alone", {"TRAIN__ENABLE": False, "TEST__NUM_ENSEMBLE_VIEWS": 1})
    killed = case.reach(run, trigger) and kill
    if killed:
        send(run.all_pids(), signal.SIGKILL)
    return case.finish(run, {0, -signal.SIGKILL} if killed else {0})
