"""Training runs of a study, with their dependencies.

A run is a process of `slowfast-lara run`. It uses one thread, so that its results do not depend on
the number of cores. It starts after the run that provides its initial weights has finished. A
finished run is not repeated. An interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fvcore.common.config import CfgNode

from slowfast_lara.config import load_config
from slowfast_lara.errors import InputError, RunError
from slowfast_lara.files import open_in_place, write_json, write_text
from slowfast_lara.prepare.synthetic import SPLITS
from slowfast_lara.runs.checkpoint import TrainingPosition, path_of
from slowfast_lara.runs.folder import TEST_RESULTS, json_object
from studies.rows import EXACT_FIRST, StudyRow

_SETTINGS = "study.yaml"
_SET_NOTE = "made_with.json"
_FINETUNE_LISTS = "finetune"
_COMMAND = [sys.executable, "-m", "slowfast_lara.cli"]


class StudyRun(NamedTuple):
    """Training of one row with one seed."""

    row: StudyRow
    seed: int
    folder: Path
    # Resolved when planned, so that later edits of config files do not change it.
    config: CfgNode
    # The run whose last checkpoint provides the initial weights; None for random weights.
    initial_run: StudyRun | None = None

    @property
    def name(self) -> str:
        return f"{self.row.name}, seed {self.seed}"

    @property
    def is_done(self) -> bool:
        return (self.folder / TEST_RESULTS).is_file()

    def weights(self) -> str:
        """Path of the checkpoint of the last epoch, which may not exist yet."""
        return path_of(str(self.folder), TrainingPosition(self.config.SOLVER.MAX_EPOCH), 1)

    def accuracy(self) -> float:
        """Top-1 test accuracy, in percent."""
        path = self.folder / TEST_RESULTS
        value = json_object(path.read_text(encoding="utf-8"), path).get("top1_acc")
        if not isinstance(value, (int, float)):
            raise InputError(f"{path}: expected a number for 'top1_acc', got {value!r}")
        return value


def plan(
    rows: Sequence[StudyRow], seeds: Sequence[int], work: Path, opts: Sequence[str], protocol: str
) -> list[StudyRun]:
    """The runs of all rows, ordered by seed: an interrupted study has all rows for the first seeds.

    Protocol "finetune", as in the paper: for each seed, a model is trained with exact attention,
    and each row is fine-tuned from the weights of this model. Protocol "scratch": each row is
    trained from random weights.
    """
    runs = []
    data = work / "data"
    for seed in seeds:
        common = ["RNG_SEED", str(seed), *opts]
        all_videos = ["DATA.PATH_TO_DATA_DIR", str(data), *common]
        if protocol == "scratch":
            runs += [study_run("study/base", row, seed, work / "runs", all_videos) for row in rows]
            continue
        exact = study_run("study/exact", EXACT_FIRST, seed, work, all_videos)
        lists = ["DATA.PATH_TO_DATA_DIR", str(data / _FINETUNE_LISTS)]
        fewer_videos = [*lists, "DATA.PATH_PREFIX", str(data), *common]
        for row in rows:
            runs.append(
                study_run("study/finetune", row, seed, work / protocol, fewer_videos, exact)
            )
    return runs


def study_run(
    config: str,
    row: StudyRow,
    seed: int,
    parent: Path,
    opts: Sequence[str],
    initial_run: StudyRun | None = None,
) -> StudyRun:
    folder = parent / row.name / f"seed_{seed}"
    keys = ["OUTPUT_DIR", str(folder), *row.opts, *opts]
    if initial_run:
        keys += ["TRAIN.CHECKPOINT_FILE_PATH", initial_run.weights()]
    return StudyRun(row, seed, folder, load_config(config, keys), initial_run)


def make_set(folder: Path, arguments: dict[str, int | str]) -> None:
    """Make the synthetic videos, unless the folder already has them."""
    note = folder / _SET_NOTE
    if note.is_file():
        made_with = json_object(note.read_text(encoding="utf-8"), note)
        if made_with != arguments:
            raise InputError(
                f"{folder} was made with {made_with}, expected {arguments}; remove it, or "
                "choose another --work"
            )
        return
    flags = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    textured, plain = ["studies.textured"], ["slowfast_lara.cli", "data", "synthetic"]
    module = textured if "textures" in arguments else plain
    command = [sys.executable, "-m", *module, str(folder), *flags]
    if subprocess.run(command, env=_environment()).returncode:
        raise RunError(f"could not make the videos: {' '.join(command)}")
    write_json(note, arguments)


def write_finetune_lists(folder: Path) -> None:
    """Write the lists for fine-tuning, with every second training video to save time."""
    for split in SPLITS:
        lines = (folder / f"{split}.csv").read_text(encoding="utf-8").splitlines()
        some = lines[::2] if split == "train" else lines
        write_text(folder / _FINETUNE_LISTS / f"{split}.csv", "\n".join(some) + "\n")


def run_all(runs: Sequence[StudyRun], jobs: int) -> None:
    """Run the unfinished runs and the runs that provide their initial weights, `jobs` at a time.

    An exception terminates the active runs.
    """
    waiting = [run for run in _with_initial_runs(runs) if not _check_done(run)]
    # Start the pretraining of a seed with the rows of the previous seed, to keep all jobs busy.
    waiting.sort(key=lambda run: (run.seed, 1) if run.initial_run else (run.seed - 1, 0))
    running: dict[subprocess.Popen, StudyRun] = {}
    total = len(waiting)
    try:
        while waiting or running:
            ready = [run for run in waiting if not run.initial_run or run.initial_run.is_done]
            for run in ready[: jobs - len(running)]:
                waiting.remove(run)
                running[_start(run)] = run
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                _check_end(run, process.returncode)
                finished = total - len(waiting) - len(running)
                print(f"{finished}/{total} {run.name}: {run.accuracy():.1f} %", flush=True)
            time.sleep(0.1)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _with_initial_runs(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """`runs` and their initial runs, without duplicates; each run follows its initial run."""
    found: dict[Path, StudyRun] = {}
    for run in runs:
        if run.initial_run:
            found |= {first.folder: first for first in _with_initial_runs([run.initial_run])}
        found[run.folder] = run
    return list(found.values())


def _check_done(run: StudyRun) -> bool:
    """Whether a run has finished; raises if its folder contains a run with other settings."""
    settings = run.folder / _SETTINGS
    if settings.is_file() and settings.read_text(encoding="utf-8") != run.config.dump():
        raise InputError(
            f"{run.folder} contains a run with other settings; remove it, or choose another --work"
        )
    return run.is_done


def _start(run: StudyRun) -> subprocess.Popen:
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / _SETTINGS, run.config.dump())
    command = [*_COMMAND, "run", "--cfg", str(run.folder / _SETTINGS)]
    with open(run.folder / "errors.log", "wb", opener=open_in_place) as errors:
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=_environment()
        )


def _check_end(run: StudyRun, code: int) -> None:
    if code or not run.is_done:
        lines = (run.folder / "errors.log").read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {code}"
        raise RunError(f"{run.name}: {reason} (see {run.folder})")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
