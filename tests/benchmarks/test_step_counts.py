"""Launches and saved bytes of a training step, counted on the fake CUDA device."""

from __future__ import annotations

import csv
import shutil

import pytest

from benchmarks.__main__ import main


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_counts_of_two_sizes(tmp_path, capsys):
    rows = []
    for clips in (2, 4):
        out = tmp_path / str(clips)
        command = ["step", "--configs", "quick/softmax", "--clips", str(clips), "--out", str(out)]
        assert main(command) == 0, capsys.readouterr()
        lines = [x for x in out.with_suffix(".csv").read_text().splitlines() if x[0] != "#"]
        rows.append(list(csv.DictReader(lines)))
        assert "| quick/softmax | triton | this |" in out.with_suffix(".md").read_text()
    for in_torch, in_triton in rows:
        assert (in_torch["kernels"], in_triton["kernels"]) == ("torch", "triton")
        assert int(in_torch["of Triton kernels"]) == 0 < int(in_triton["of Triton kernels"])
        assert int(in_triton["launches"]) < int(in_torch["launches"])
    two, four = rows
    for few, many in zip(two, four):
        assert few["launches"] == many["launches"]  # they do not depend on the batch size
        assert int(many["saved, bytes"]) > 1.5 * int(few["saved, bytes"]) > 0
