"""CONTRIBUTING.md names functions that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
TRACES = TEXT.split("## Traces")[1].split("\n## ")[0]
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", TRACES)))


def test_traces_name_functions():
    assert len(NAMES) > 20


@pytest.mark.parametrize("name", NAMES)
def test_every_function_of_a_trace_exists(name):
    parts = f"slowfast_lara.{name}".split(".")
    for end in range(len(parts), 1, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return
    pytest.fail(f"no module of {name}")
