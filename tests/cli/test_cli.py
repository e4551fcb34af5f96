"""`slowfast-lara SUBCOMMAND`, and the scripts of tools/ and datasets/."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from slowfast_lara.cli import COMMANDS, main
from slowfast_lara.cli.data import _KINDS as DATA_KINDS
from tests.helpers.preloaded import environment
from tests.helpers.runs import ROOT, finish, start
from tests.helpers.small_models import only_error

pytestmark = pytest.mark.usefixtures("in_process")

SCRIPTS = sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "datasets").glob("*.py")])
EVERY = [
    *([name] for name in COMMANDS),
    *(["data", kind] for kind in DATA_KINDS),
    *(["benchmark", kind] for kind in ("crop", "length", "data", "lists")),
]
# What each is given that is not there, or cannot be used.
NO_MODEL = ["--cfg", "no.yaml", "--checkpoint", "no.pyth"]
BAD_FILES = [
    ["run", "--cfg", "no.yaml"],
    ["predict", *NO_MODEL, "no.mp4"],
    ["visualize", *NO_MODEL, "--out", "look", "no.mp4"],
    ["swap", "no"],
    ["export", "no", "out"],
    ["demo", "no"],
    ["report", "no"],
    ["configs", "no"],
    ["configs", "quick/lara", "--out", "file/mine.yaml"],
    ["data", "lists-kinetics", "no", "lists", "--train", "no.csv"],
    ["data", "lists-ssv2", "no", "no", "lists"],
    ["data", "lists-folder", "no", "lists"],
    ["data", "check", "bad.txt", "no.csv"],
    ["data", "prepare", "no", "out"],
    ["data", "speed", "--cfg", "no.yaml"],
    ["data", "synthetic", "file/set"],
    ["benchmark", "crop", "--estimators", "no"],
    ["benchmark", "length", "--estimators", "no"],
    ["benchmark", "data", "no.mp4"],
    ["approximation-error", "no", "no.mp4"],
    ["approximation-error", *NO_MODEL, "--video", "no.mp4"],
    ["compare-attention", "--rows", "no"],
    ["compare-recipes", "--rows", "no"],
]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """In an empty folder with one file; the program's name is changed on the way."""
    monkeypatch.setattr(sys, "argv", ["slowfast-lara"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()


def code_of(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:  # of argparse
        return end.code


def test_help_lists_the_subcommands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{metadata.version('slowfast_lara')}\n"


@pytest.mark.parametrize("name", [" ".join(words) for words in EVERY])
def test_help_loads_no_torch(name):
    """Nor anything else that takes its time."""
    program = (
        "import sys\n"
        "from slowfast_lara.cli import main\n"
        "try:\n"
        "    main([*sys.argv[1:], '--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "slow = {'torch', 'slowfast', 'fvcore', 'numpy', 'cv2', 'av', 'matplotlib'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", program, *name.split()]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: slowfast-lara {name} "), done.stdout


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_a_bad_flag(words, capsys):
    assert code_of([*words, "--bogus"]) == 2
    assert only_error(capsys)


def test_every_subcommand_has_a_bad_file_here():
    assert {words[0] for words in BAD_FILES} == set(COMMANDS)
    assert {words[1] for words in BAD_FILES if words[0] == "data"} == set(DATA_KINDS)


@pytest.mark.parametrize("words", BAD_FILES, ids=" ".join)
def test_a_bad_file(words, capsys):
    assert code_of(words) == 2
    assert only_error(capsys)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_bad_flag_of_a_script(script):
    code, stdout, stderr = finish(start("--bogus", program=(str(script),)))
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and len(stderr.splitlines()) == 1, stderr


def test_codes_and_errors_come_through(capsys):
    assert main(["report", "."]) == 2
    assert "not a run" in only_error(capsys)
    assert main(["dance"]) == 2
    assert "known: run, predict" in only_error(capsys)
    assert main(["predikt"]) == 2
    assert "did you mean predict?" in only_error(capsys)
