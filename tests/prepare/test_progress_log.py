"""Progress log: resuming, and invalid lines."""

from __future__ import annotations

import pytest

from slowfast_lara.prepare.progress_log import ProgressLog


def test_entries_are_kept_and_added(tmp_path):
    path = str(tmp_path / "log.jsonl")
    for number in range(3):
        log = ProgressLog(path)
        assert log.entries == {str(earlier): [earlier, "x"] for earlier in range(number)}
        with log.appending():
            log.add(str(number), number, "x")


@pytest.mark.parametrize("line", ["x", "1", '[["a"], 1]', f"[1, {'9' * 5000}]", '["cut', "\xff"])
def test_invalid_lines_are_ignored(tmp_path, line):
    path = tmp_path / "log.jsonl"
    path.write_text(f'["a.mp4", ""]\n{line}\n["b.mp4", "bad"]\n["cut', encoding="latin-1")
    log = ProgressLog(str(path))
    assert log.entries["a.mp4"] == [""] and log.entries["b.mp4"] == ["bad"]
    with log.appending():
        log.add("c.mp4", "")
    assert ProgressLog(str(path)).entries == log.entries
