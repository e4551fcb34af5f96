"""What must hold after a run has ended, however it was attacked."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.torture.folder import Place, RunFolder
from tests.torture.processes import Started
from tests.torture.setting import (
    SAVED_EVERY,
    TEST_VIDEOS,
    TRAIN_VIDEOS,
    Reference,
    content_sum,
    read_checkpoint,
    read_scores,
)

# A process that has lost its parent looks for it every few seconds.
ORPHAN_SECONDS = 30
# What PyTorch's own code and torchrun print; a run cannot keep them from it.
_TORCH = ("[W", "[E", "[I", "[rank", "Exception raised from", "frame #", "<omitting python")
_OF_TORCHRUN = ("ChildFailedError", "SignalException")


def check_codes(run: Started, codes: list[int | None], allowed: set[int]) -> Iterator[str]:
    for number, code in enumerate(codes):
        if code is None:
            yield f"process {number} of {run.launch} did not end in time"
        elif code not in allowed:
            yield f"exit code {code} of process {number} ({run.launch}); allowed: {sorted(allowed)}"


def check_words(run: Started, codes: list[int | None]) -> Iterator[str]:
    """An error is one line; the files that it lists may follow, indented."""
    for code, text in zip(codes, run.said()):
        if code is None or code < 0:  # killed, as its workers may tell
            continue
        lines = text.splitlines()
        if run.launch == "torchrun":
            lines = [line for line in lines if line.startswith("error: ")]
            for part in text.split("Traceback (most recent call last)")[1:]:
                if not any(name in part for name in _OF_TORCHRUN):
                    yield f"a traceback: {text[-3000:]}"
        elif run.launch in ("nodes", "spawn"):
            lines = [line for line in lines if not line.startswith(_TORCH)]
        if "Traceback" in text and run.launch != "torchrun":
            yield f"a traceback: {text[-3000:]}"
        told = [line for line in lines if line and not line.startswith("  ")]
        most = {"alone": 1, "nodes": 2}.get(run.launch, 4)
        least = 0 if "SignalException" in text else 1  # torchrun was told to end when all was done
        if any(not line.startswith("error: ") for line in told):
            yield f"besides errors, stderr has: {text[-2000:]!r}"
        elif code > 0 and not least <= len(told) <= most:
            yield f"exit code {code} with {len(told)} lines of error: {text[-2000:]!r}"
        elif code == 0 and told:
            yield f"exit code 0 with an error: {text[-2000:]!r}"


def check_nobody_left(run: Started) -> Iterator[str]:
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := run.all_pids()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        yield f"{len(left)} processes are left behind: {left}"
        run.kill_all()


def check_files(out: RunFolder, codes: list[int | None]) -> Iterator[str]:
    """Of a run that ended by its own will."""
    if any(code not in (0, 75) for code in codes):
        return
    if left := out.unfinished():
        yield f"unfinished files are left: {left}"
    if (out.path / ".lock").exists():
        yield "the lock is left"


class Since(NamedTuple):
    """The checkpoint that a run is to go on from: its name, its optimiser's steps, its place."""

    name: str | None = None
    steps: int = 0
    place: Place = Place(0, 0)


def read_since(out: RunFolder, name: str | None) -> Since:
    if name is None:
        return Since()
    content = read_checkpoint(out.checkpoints / name)
    samples = content["iteration"] * content["global_batch"]
    return Since(name, _steps(content), Place(content["epoch"] + 1, samples))


def check_progress(
    out: RunFolder, newest: str | None, since: Since, log_start: int, batch: int, stopped: bool
) -> Iterator[str]:
    """Nothing is lost beyond the last checkpoint; of a run that has saved, nothing at all."""
    place = out.places()[newest] if newest else Place(0, 0)
    if place < since.place:
        yield f"the newest checkpoint is {newest}, though the run began with {since.name}"
    done = out.last_iteration(log_start, batch)
    if done is None:
        return
    lost = _samples(done, batch) - _samples(place, batch)
    if lost > (0 if stopped else SAVED_EVERY * batch):
        yield f"{done} was reached, but the newest checkpoint is {newest}"


def _samples(place: Place, batch: int) -> int:
    return place.epochs * (TRAIN_VIDEOS // batch * batch) + place.samples


def check_checkpoint(
    out: RunFolder, newest: str | None, reference: Reference | None
) -> Iterator[str]:
    if newest is None:
        return
    try:
        content = read_checkpoint(out.checkpoints / newest)
    except Exception as error:
        yield f"{newest} cannot be read: {error}"
        return
    if reference is not None and content_sum(content) != reference.checkpoints.get(newest):
        yield f"{newest} is not that of the reference"


def check_steps(out: RunFolder, since: Since, newest: str | None, batch: int) -> Iterator[str]:
    """Every batch counts once: the optimiser has made as many steps as there were batches."""
    if newest is None or newest == since.name:
        return
    content = read_checkpoint(out.checkpoints / newest)
    epochs = content["epoch"] + 1 - since.place.epochs
    made = epochs * (TRAIN_VIDEOS // batch) + content["iteration"] - since.place.samples // batch
    if content["global_batch"] == batch and _steps(content) != since.steps + made:
        yield f"{newest} has made {_steps(content)} steps; {since.steps} + {made} are expected"


def _steps(content: dict[str, Any]) -> int:
    return int(next(iter(content["optimizer_state"]["state"].values()))["step"])


def check_results(
    out: RunFolder, scores: dict[str, np.ndarray] | None, broken: set[str]
) -> Iterator[str]:
    """Every video of the test is counted once, or told to have failed."""
    results = json.loads((out.path / "test_results.json").read_text())
    counted = [os.path.basename(video["path"]) for video in results["videos"]]
    failed = [os.path.basename(video["path"]) for video in results["failed"]]
    if len(set(counted + failed)) != len(counted + failed) or len(counted + failed) != TEST_VIDEOS:
        yield f"{len(counted)} videos are counted, {len(failed)} have failed of {TEST_VIDEOS}"
    if set(failed) - broken:
        yield f"whole videos have failed: {set(failed) - broken}"
    ours = read_scores(out.path)
    if set(ours) != set(counted):
        yield "the files of results and of scores have other videos"
    if scores is not None:
        other = [name for name in ours if not np.array_equal(ours[name], scores[name])]
        if other:
            yield f"the scores of {len(other)} videos are not those of the reference: {other[:3]}"


def name_of(code: int | None) -> str:
    if code is None:
        return "hung"
    return signal.Signals(-code).name if code < 0 else str(code)
