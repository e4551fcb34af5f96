"""Examples: each script and the notebook run to their end."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.runs import finish, start, wait_for

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NUM_TEST_VIDEOS = 4


def run_python(folder: Path, *arguments: object) -> str:
    """Run `python ARGUMENTS` in a folder and return its standard output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "VIDEOS": str(16 * NUM_TEST_VIDEOS),
    }
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the notebook's code cells ran as one script."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = json.loads((EXAMPLES / "train_and_look.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = folder / "notebook.py"
    script.write_text("\n\n".join(code), encoding="utf-8")
    run_python(folder, script)
    return folder


def test_notebook(notebook):
    results = json.loads((notebook / "runs" / "exact" / "test_results.json").read_text())
    assert results["num_videos"] == NUM_TEST_VIDEOS and results["failed"] == []
    assert (notebook / "runs" / "look" / "point_1.png").is_file()


def test_notebook_is_committed_without_outputs():
    cells = json.loads((EXAMPLES / "train_and_look.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_predict_folder(notebook, tmp_path):
    videos = notebook / "runs" / "set" / "videos"
    for path in sorted(videos.glob("test_*.mp4"))[:2]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    run = notebook / "runs" / "exact"
    printed = run_python(tmp_path, EXAMPLES / "predict_folder.py", run, ".", "out")
    assert printed.startswith("2 videos")
    rows = list(csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8")))
    classes = json.loads((notebook / "runs" / "set" / "classes.json").read_text())
    assert len(rows) == 2 and all(row["class"] in classes for row in rows)
    assert sorted(np.load(tmp_path / "out.npz")) == sorted(row["video"] for row in rows)


def test_custom_estimator(tmp_path):
    lines = run_python(tmp_path, EXAMPLES / "custom_estimator.py").splitlines()
    errors = [float(line.split()[-1]) for line in lines[:3]]
    assert errors == sorted(errors) and errors[0] == 0 < errors[1]
    first, last = (float(word) for word in lines[3].removeprefix("loss: ").split(" -> "))
    assert last < first


def test_attention_in_your_model(tmp_path):
    printed = run_python(tmp_path, EXAMPLES / "attention_in_your_model.py")
    assert printed.count("RMS error") == 4 and "nan" not in printed


def test_every_example_is_listed():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(files) == 4 and all(f"`{name}`" in listed for name in files)


def test_ctrl_c_of_the_quickstart(tmp_path):
    """It waits for the subcommand, which ends by itself, and has no traceback."""
    process = start(tmp_path, program=(str(ROOT / "tools" / "quickstart.py"),))
    wait_for(lambda: [*(tmp_path / "videos").rglob("*.mp4")])
    os.killpg(process.pid, signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 130 and "Traceback" not in stderr, stderr
