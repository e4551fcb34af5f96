"""Checks after a run has ended: exit codes, stderr, processes, files, progress, results."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.torture.processes import StartedRun
from tests.torture.run_folder import RunFolder, SavedPosition
from tests.torture.workload import (
    CHECKPOINT_ITERATIONS,
    TEST_VIDEOS,
    TRAIN_VIDEOS,
    Reference,
    content_digest,
    read_checkpoint,
    read_scores,
)

# A process checks every few seconds whether its parent is alive.
ORPHAN_SECONDS = 30
# Lines that PyTorch and torchrun print to stderr.
_TORCH = ("[W", "[E", "[I", "[rank", "Exception raised from", "frame #", "<omitting python")
_TORCHRUN_ERRORS = ("ChildFailedError", "SignalException")


def check_codes(run: StartedRun, codes: list[int | None], allowed: set[int]) -> Iterator[str]:
    for number, code in enumerate(codes):
        if code is None:
            yield f"process {number} of {run.launch} did not exit in time"
        elif code not in allowed:
            yield f"exit code {code} of process {number} ({run.launch}); allowed: {sorted(allowed)}"


def check_stderr(run: StartedRun, codes: list[int | None]) -> Iterator[str]:
    """An error is one line; indented lines with file names may follow."""
    for code, text in zip(codes, run.stderr_texts()):
        # The workers of a killed rank may print errors.
        if code is None or code < 0 or run.restarts:
            continue
        lines = text.splitlines()
        if run.launch == "torchrun":
            lines = [line for line in lines if line.startswith("error: ")]
            for part in text.split("Traceback (most recent call last)")[1:]:
                if not any(name in part for name in _TORCHRUN_ERRORS):
                    yield f"a traceback: {text[-3000:]}"
        elif run.launch in ("nodes", "spawn"):
            lines = [line for line in lines if not line.startswith(_TORCH)]
        if "Traceback" in text and run.launch != "torchrun":
            yield f"a traceback: {text[-3000:]}"
        errors = [line for line in lines if line and not line.startswith("  ")]
        maximum = {"alone": 1, "nodes": 2}.get(run.launch, 4)
        # torchrun may receive the signal after all ranks have exited.
        minimum = 0 if "SignalException" in text else 1
        if any(not line.startswith("error: ") for line in errors):
            yield f"stderr has other lines than errors: {text[-2000:]!r}"
        elif code > 0 and not minimum <= len(errors) <= maximum:
            yield f"exit code {code} with {len(errors)} error lines: {text[-2000:]!r}"
        elif code == 0 and errors:
            yield f"exit code 0 with an error: {text[-2000:]!r}"


def check_no_process_left(run: StartedRun) -> Iterator[str]:
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := run.all_pids()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        yield f"{len(left)} processes are still running: {left}"
        run.kill_all()


def check_files(out: RunFolder, codes: list[int | None]) -> Iterator[str]:
    """Check that a run that ended regularly leaves no temporary files."""
    if any(code not in (0, 75) for code in codes):
        return
    if left := out.unfinished():
        yield f"temporary files are left: {left}"
    if (out.path / ".lock").exists():
        yield "the lock file is left"


class StartPoint(NamedTuple):
    """The checkpoint that a run resumes from: name, optimiser steps, position."""

    name: str | None = None
    steps: int = 0
    position: SavedPosition = SavedPosition(0, 0)


def read_start_point(out: RunFolder, name: str | None) -> StartPoint:
    if name is None:
        return StartPoint()
    content = read_checkpoint(out.checkpoints / name)
    samples = content["iteration"] * content["global_batch"]
    return StartPoint(name, _steps(content), SavedPosition(content["epoch"] + 1, samples))


def check_progress(
    out: RunFolder,
    newest: str | None,
    start_point: StartPoint,
    log_start: int,
    batch: int,
    stopped: bool,
) -> Iterator[str]:
    """Check that at most the work since the last checkpoint is lost; nothing after a save."""
    position = out.positions()[newest] if newest else SavedPosition(0, 0)
    if position < start_point.position:
        yield f"the newest checkpoint is {newest}, but the run started from {start_point.name}"
    done = out.last_iteration(log_start, batch)
    if done is None:
        return
    lost = _samples(done, batch) - _samples(position, batch)
    if lost > (0 if stopped else CHECKPOINT_ITERATIONS * batch):
        yield f"the log reaches {done}, but the newest checkpoint is {newest}"


def _samples(position: SavedPosition, batch: int) -> int:
    return position.epochs * (TRAIN_VIDEOS // batch * batch) + position.samples


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
    if reference is not None and content_digest(content) != reference.checkpoints.get(newest):
        yield f"{newest} differs from the reference"


def check_steps(
    out: RunFolder, start_point: StartPoint, newest: str | None, batch: int
) -> Iterator[str]:
    """Check that the optimiser has made one step per batch."""
    if newest is None or newest == start_point.name:
        return
    content = read_checkpoint(out.checkpoints / newest)
    epochs = content["epoch"] + 1 - start_point.position.epochs
    expected = (
        epochs * (TRAIN_VIDEOS // batch)
        + content["iteration"]
        - start_point.position.samples // batch
    )
    if content["global_batch"] == batch and _steps(content) != start_point.steps + expected:
        yield f"{newest}: expected {start_point.steps} + {expected} steps, got {_steps(content)}"


def _steps(content: dict[str, Any]) -> int:
    return int(next(iter(content["optimizer_state"]["state"].values()))["step"])


def check_results(
    out: RunFolder, scores: dict[str, np.ndarray] | None, broken: set[str]
) -> Iterator[str]:
    """Check that every test video is scored once, or listed as failed."""
    results = json.loads((out.path / "test_results.json").read_text())
    scored = [os.path.basename(video["path"]) for video in results["videos"]]
    failed = [os.path.basename(video["path"]) for video in results["failed"]]
    if len(set(scored + failed)) != len(scored + failed) or len(scored + failed) != TEST_VIDEOS:
        yield f"{len(scored)} videos are scored and {len(failed)} failed, of {TEST_VIDEOS}"
    if set(failed) - broken:
        yield f"intact videos failed: {set(failed) - broken}"
    ours = read_scores(out.path)
    if set(ours) != set(scored):
        yield "the result file and the score file have different videos"
    if scores is not None:
        other = [name for name in ours if not np.array_equal(ours[name], scores[name])]
        if other:
            yield f"the scores of {len(other)} videos differ from the reference: {other[:3]}"


def name_of(code: int | None) -> str:
    if code is None:
        return "hung"
    return signal.Signals(-code).name if code < 0 else str(code)
