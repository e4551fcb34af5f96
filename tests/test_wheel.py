"""The wheel: its files, and a tour of the commands without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

import slowfast_lara
from slowfast_lara.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
# The sources of the wheel, and two packages that must stay out of it.
FOLDERS = ("slowfast_lara", "configs", "benchmarks", "studies")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a build/ folder and would reuse an old one."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name)
    for name in FILES:
        shutil.copy(ROOT / name, source)
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
    (path,) = out.glob("*.whl")
    return path


def run_pip(*arguments: Any) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*pip, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_of_the_wheel(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    configs = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(configs) > 30
    assert {f"slowfast_lara/shipped_configs/{path.as_posix()}" for path in configs} <= files
    modules = {path.relative_to(ROOT) for path in (ROOT / "slowfast_lara").rglob("*.py")}
    assert {path.as_posix() for path in modules} <= files
    assert "slowfast_lara/py.typed" in files
    info = f"slowfast_lara-{slowfast_lara.__version__}.dist-info"
    assert {name.split("/")[0] for name in files} == {"slowfast_lara", info}
    assert not any(part.startswith("test") for name in files for part in Path(name).parts)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a virtual environment with the wheel and the dependencies of this environment.

    A .pth file adds the site-packages of this environment to the path. Python does not read the
    .pth files in that folder, so an editable install of the checkout has no effect. The wheel is
    installed first, so that pip does not find an installed version in that folder.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    run_pip("--python", python, "install", "--no-deps", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.mark.slow
def test_commands_without_the_checkout(installed, tmp_path):
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["OMP_NUM_THREADS"] = "1"

    def run(*command: Any) -> str:
        program, *arguments = map(str, command)
        done = subprocess.run(
            [installed / program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def tool(*arguments: Any) -> str:
        return run("slowfast-lara", *arguments)

    home = Path(run("python", "-c", "import slowfast_lara; print(slowfast_lara.__file__)").strip())
    assert home.is_relative_to(installed.parent)
    where = "from slowfast_lara.config.shipped import shipped_folder; print(shipped_folder())"
    assert run("python", "-c", where).strip() == str(home.parent / "shipped_configs")
    assert set(build_parser().subcommands) <= set(tool("--help").split())

    assert "K400/lara_224_16x4" in tool("configs")
    tool("configs", "quick/lara", "--out", "mine.yaml")
    sizes = ("--classes", 4, "--train", 24, "--val", 4, "--test", 4, "--size", 64, "--frames", 16)
    tool("data", "synthetic", "set", *sizes)
    tool("data", "check", "bad.txt", "set/test.csv")
    changes = ("DATA.PATH_TO_DATA_DIR", "set", "SOLVER.MAX_EPOCH", 1, "OUTPUT_DIR", "run")
    tool("run", "--cfg", "quick/lara", *changes)
    results = json.loads((tmp_path / "run" / "test_results.json").read_text())
    assert len(results["videos"]) == 4 and results["failed"] == []

    checkpoint = ("--checkpoint", "run/checkpoints/checkpoint_epoch_00001.pyth")
    video = Path(results["videos"][0]["path"])
    tool("predict", "--cfg", "mine.yaml", *checkpoint, "--json", "out.json", video)
    assert json.loads((tmp_path / "out.json").read_text())
    model = ("--cfg", "run/config.yaml", *checkpoint)
    tool("visualize", *model, "--estimators", "lara", "--out", "look", video)
    tool("predict", "run", video)
    assert (tmp_path / "look" / "point_1.png").is_file()
    # A copy of the checkpoint is enough, without the run and its data.
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(tmp_path / checkpoint[1], empty / "model.pyth")
    shutil.copy(tmp_path / video, empty / "v.mp4")
    names = json.loads((tmp_path / "set" / "classes.json").read_text())
    (tmp_path / "set").rename(tmp_path / "gone")
    tool("predict", "empty/model.pyth", "empty/v.mp4", "--json", "empty/out.json")
    (entry,) = json.loads((empty / "out.json").read_text())["videos"]
    assert entry["top5_names"] == [names[label] for label in entry["top5"]]
    tool("report", "run")
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
