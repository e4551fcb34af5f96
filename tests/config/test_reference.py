"""The table of keys, and docs/config.md generated from it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fvcore.common.config import CfgNode

from slowfast_lara.config import get_cfg
from slowfast_lara.config.defaults import walk
from slowfast_lara.config.keys import Affects, Key, all_keys

ROOT = Path(__file__).resolve().parents[2]
LEAVES = {key: value for key, value in walk(get_cfg()) if not isinstance(value, CfgNode)}


def test_committed_page_is_current():
    command = [sys.executable, ROOT / "docs" / "config_reference.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_page_lists_every_key_once():
    text = (ROOT / "docs" / "config.md").read_text()
    tables, unused = text.split("## PySlowFast's, not used here")
    rows = re.findall(r"^\| `(\S+)` \|", tables, re.M)
    listed = re.findall(r"`([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)` `", unused)
    assert sorted(rows + listed) == sorted(LEAVES)
    assert set(rows) == set(all_keys())


@pytest.mark.parametrize("key", all_keys())
def test_every_key_has_all_fields_and_a_valid_default(key):
    known = all_keys()[key]
    assert len(known.meaning) > 3 and not known.meaning.endswith(".")
    assert isinstance(known.affects, Affects)
    assert isinstance(known.shared, bool)
    assert known.allowed.problem(LEAVES[key]) is None


def test_effect_and_allowed_values_have_no_default():
    """Each row of the table states them."""
    fields = inspect.signature(Key).parameters
    required = {name for name, field in fields.items() if field.default is field.empty}
    assert required == {"default", "affects", "allowed", "meaning"}


def test_keys_read_by_the_code_are_in_the_table():
    """PySlowFast keys that the code names, by `cfg.NODE.KEY` or in a message."""
    package = ROOT / "slowfast_lara"
    code = "\n".join(path.read_text() for path in package.rglob("*.py"))
    words = set(re.findall(r"\b[A-Z_]+(?:\.[A-Z_]+)*\b", code.replace("cfg.", "")))
    assert {"SOLVER.BASE_LR", "NUM_GPUS"} <= words
    assert words & set(LEAVES) <= set(all_keys())
