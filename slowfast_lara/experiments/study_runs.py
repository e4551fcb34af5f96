"""The runs of a study: started one after another, and never twice.

A run is a call of `slowfast-lara run` in a process of its own, with one thread, so that
its numbers do not depend on the number of cores. A run that has its result is left alone;
one that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fvcore.common.config import CfgNode

from slowfast_lara.config import load_config
from slowfast_lara.engine.run_folder import TEST_RESULTS, json_object
from slowfast_lara.errors import InputError, RunError
from slowfast_lara.experiments.study_rows import StudyRow
from slowfast_lara.files import write_json, write_text

BASE_CONFIG = "study/base"
_SETTINGS = "study.yaml"
_SET_NOTE = "made_with.json"
_COMMAND = [sys.executable, "-m", "slowfast_lara.cli"]


class StudyRun(NamedTuple):
    """A row with a seed."""

    row: StudyRow
    seed: int
    folder: Path
    # The resolved config, which is what is run: a file edited meanwhile changes nothing.
    settings: str

    @property
    def done(self) -> bool:
        return (self.folder / TEST_RESULTS).is_file()

    def config(self) -> CfgNode:
        return load_config(self.folder / _SETTINGS)

    def accuracy(self) -> float:
        """Of its test, in percent."""
        path = self.folder / TEST_RESULTS
        value = json_object(path.read_text(encoding="utf-8"), path).get("top1_acc")
        if not isinstance(value, (int, float)):
            raise InputError(f"{path}: a number is expected as its 'top1_acc'")
        return value


def plan(
    rows: Sequence[StudyRow], seeds: Sequence[int], work: Path, opts: Sequence[str]
) -> list[StudyRun]:
    """All runs, seed by seed: a study cut short has a whole table of fewer seeds."""
    runs = []
    for seed in seeds:
        for row in rows:
            folder = work / "runs" / row.name / f"seed_{seed}"
            places = ["DATA.PATH_TO_DATA_DIR", str(work / "data"), "OUTPUT_DIR", str(folder)]
            keys = [*places, "RNG_SEED", str(seed), *row.opts, *opts]
            runs.append(StudyRun(row, seed, folder, load_config(BASE_CONFIG, keys).dump()))
    return runs


def make_set(folder: Path, arguments: dict[str, int]) -> None:
    """The synthetic videos, unless they are there."""
    note = folder / _SET_NOTE
    if note.is_file():
        made_with = json_object(note.read_text(encoding="utf-8"), note)
        if made_with != arguments:
            raise InputError(
                f"{folder} was made with {made_with}, not {arguments}; remove it, or "
                "choose another --work"
            )
        return
    flags = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    command = [*_COMMAND, "data", "synthetic", str(folder), *flags]
    if subprocess.run(command, env=_environment()).returncode:
        raise RunError(f"the videos could not be made: {' '.join(command)}")
    write_json(note, arguments)


def run_all(runs: Sequence[StudyRun], jobs: int) -> None:
    """Do what is not done, `jobs` at a time. Stopped runs save themselves."""
    waiting = deque(run for run in runs if not _is_done(run))
    running: dict[subprocess.Popen, StudyRun] = {}
    total = len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.popleft()
                running[_start(run)] = run
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                _check_end(run, process.returncode)
                finished = total - len(waiting) - len(running)
                name = f"{run.row.name}, seed {run.seed}"
                print(f"{finished}/{total} {name}: {run.accuracy():.1f} %", flush=True)
            time.sleep(0.1)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _is_done(run: StudyRun) -> bool:
    settings = run.folder / _SETTINGS
    if settings.is_file() and settings.read_text(encoding="utf-8") != run.settings:
        raise InputError(
            f"{run.folder} holds a run with other settings; remove it, or choose another --work"
        )
    return run.done


def _start(run: StudyRun) -> subprocess.Popen:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / _SETTINGS, run.settings)
    command = [*_COMMAND, "run", "--cfg", str(run.folder / _SETTINGS)]
    with open(run.folder / "errors.log", "wb") as errors:
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=_environment()
        )


def _check_end(run: StudyRun, code: int) -> None:
    if code or not run.done:
        lines = (run.folder / "errors.log").read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {code}"
        raise RunError(f"{run.row.name}, seed {run.seed}: {reason} (see {run.folder})")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
