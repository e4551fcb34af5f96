"""Deprecated names warn once and keep working."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slowfast_lara.deprecation import deprecated
from tests.helpers.preloaded import environment


def test_deprecated_function_warns_once_at_the_caller():
    def old_sum(*numbers: int) -> int:
        deprecated("old_sum", "sum", "0.5")
        return sum(numbers)

    with pytest.warns(FutureWarning, match=r"old_sum .*removed in 0\.5; use sum") as caught:
        assert old_sum(1, 2) == 3
        assert old_sum(3) == 3
    assert len(caught) == 1 and caught[0].filename == __file__


def test_deprecated_config_key():
    with pytest.warns(FutureWarning, match="TEST.OLD_KEY .*TEST.NEW_KEY"):
        deprecated("TEST.OLD_KEY", "TEST.NEW_KEY", "0.5")


def test_moved_module():
    program = (
        "import slowfast_lara.engine.checkpoint as old, slowfast_lara.runs.checkpoint as new\n"
    )
    program += "assert old.save is new.save"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("FutureWarning") == 1 and "<string>:1" in done.stderr
