"""docs/config.md: of every key, and as the code has it today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fvcore.common.config import CfgNode

from slowfast_lara.config import get_cfg
from slowfast_lara.config.defaults import walk
from slowfast_lara.config.keys import all_keys
from slowfast_lara.config.reference import reference
from tests.helpers.commands import configs as main

ROOT = Path(__file__).resolve().parents[2]
LEAVES = {key: value for key, value in walk(get_cfg()) if not isinstance(value, CfgNode)}


def test_the_committed_page_is_current(tmp_path):
    page = tmp_path / "config.md"
    assert main(["--reference", "--out", str(page)]) == 0
    assert page.read_text() == (ROOT / "docs" / "config.md").read_text(), (
        "run: slowfast-lara configs --reference --out docs/config.md --force"
    )


def test_every_key_is_there_once():
    text = reference()
    tables, unused = text.split("## PySlowFast's, not used here")
    rows = re.findall(r"^\| `(\S+)` \|", tables, re.M)
    listed = re.findall(r"`([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)` `", unused)
    assert sorted(rows + listed) == sorted(LEAVES)
    assert set(rows) == set(all_keys())


@pytest.mark.parametrize("key", all_keys())
def test_every_key_has_a_meaning_and_a_default_that_is_allowed(key):
    known = all_keys()[key]
    assert len(known.meaning) > 3 and not known.meaning.endswith(".")
    assert not known.choices or LEAVES[key] in known.choices


def test_what_the_code_reads_is_not_called_unused():
    """A key of PySlowFast that our code names, by `cfg.NODE.KEY` or in a message, has a meaning."""
    package = ROOT / "slowfast_lara"
    code = "\n".join(path.read_text() for path in package.rglob("*.py"))
    words = set(re.findall(r"\b[A-Z_]+(?:\.[A-Z_]+)*\b", code.replace("cfg.", "")))
    assert {"SOLVER.BASE_LR", "NUM_GPUS"} <= words
    assert words & set(LEAVES) <= set(all_keys())
