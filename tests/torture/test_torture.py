"""The fault injection itself: one fault, plans, and detected violations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.preloaded import environment
from tests.helpers.runs import ROOT
from tests.torture import checks
from tests.torture.experiment import draw_plan
from tests.torture.faults import FAULTS, STAGES
from tests.torture.processes import StartedRun
from tests.torture.run_folder import RunFolder, SavedPosition

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux_only
@pytest.mark.slow
def test_a_fault_of_a_fixed_seed(tmp_path):
    flags = ["--seed", "1", "--faults", "1", "--only", "SIGKILL to all processes"]
    command = [sys.executable, "-m", "tests.torture", *flags, "--folder", str(tmp_path)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 faults in 1 experiments" in done.stdout and "0 violations" in done.stdout


def test_the_seed_determines_the_plans():
    def plans(seed: int) -> list[list[list[str]]]:
        drawn = [draw_plan(seed, number, {""}, None) for number in range(20)]
        return [[[fault.kind for fault in run] for run in plan.runs] for plan in drawn]

    assert plans(3) == plans(3) != plans(4)


def test_every_fault_is_drawn():
    privileges = {fault.needs for fault in FAULTS.values()}
    plans = [draw_plan(0, number, privileges, None) for number in range(300)]
    assert {fault.kind for plan in plans for run in plan.runs for fault in run} == {*FAULTS}
    assert {fault.stage for fault in FAULTS.values()} == {*STAGES}


@pytest.mark.parametrize(
    "code, stderr, problems",
    [
        (1, "error: the disk is full\n", 0),
        (1, "error: 2 videos:\n  a\n  b\n", 0),
        (1, "", 1),
        (1, "error: a\nerror: b\n", 1),
        (0, "error: a\n", 1),
        (1, "Traceback (most recent call last):\n  x\nValueError: y\n", 2),
    ],
)
def test_invalid_stderr_is_detected(tmp_path, code, stderr, problems):
    (tmp_path / "stderr").write_text(stderr)
    run = StartedRun("alone", "", [], [tmp_path / "stderr"])
    assert len(list(checks.check_stderr(run, [code]))) == problems


def folder_with(path: Path, *names: str, log: str = "") -> RunFolder:
    (path / "checkpoints").mkdir()
    for name in names:
        (path / "checkpoints" / name).touch()
    (path / "stdout.log").write_text(log)
    return RunFolder(path)


LINE = 'json_stats: {"_type": "train_iter", "epoch": "2/6", "iter": "9/12", "loss": 1}\n'


@pytest.mark.parametrize(
    "name, stopped, lost",
    [
        ("checkpoint_epoch_00001_sample_000000018.pyth", True, False),
        ("checkpoint_epoch_00001_sample_000000012.pyth", True, True),
        ("checkpoint_epoch_00001_sample_000000012.pyth", False, False),
        ("checkpoint_epoch_00001.pyth", False, True),
    ],
)
def test_lost_work_is_detected(tmp_path, name, stopped, lost):
    out = folder_with(tmp_path, name, ".writing-1", log=LINE)
    problems = checks.check_progress(out, name, checks.StartPoint(), 0, 2, stopped)
    assert bool(list(problems)) == lost
    assert list(checks.check_files(out, [0])) == ["temporary files are left: ['.writing-1']"]


def test_lost_checkpoints_are_detected(tmp_path):
    name = "checkpoint_epoch_00001.pyth"
    out = folder_with(tmp_path, name)
    start_point = checks.StartPoint("checkpoint_epoch_00002.pyth", 24, SavedPosition(2, 0))
    assert len(list(checks.check_progress(out, name, start_point, 0, 2, False))) == 1
