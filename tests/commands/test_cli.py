"""`slowfast-lara SUBCOMMAND`."""

from __future__ import annotations

import sys

import pytest

from slowfast_lara.cli import COMMANDS, main
from tests.small_models import only_error


def test_help_lists_the_subcommands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", list(COMMANDS))
def test_subcommands_are_there(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["slowfast-lara"])
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0 and "usage: " in capsys.readouterr().out


def test_codes_and_errors_come_through(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["slowfast-lara"])
    assert main(["report", str(tmp_path)]) == 2
    assert "no run here" in only_error(capsys)
    assert main(["dance"]) == 2
    assert "known: run, predict" in only_error(capsys)
