"""`python -m benchmarks stage`: which attentions are measured, and at which sizes."""

from __future__ import annotations

import csv

from benchmarks.__main__ import main


def test_spatial_stage_of_groups_and_landmarks(tmp_path, capsys):
    """Exact attention is the baseline and comes first, whatever attentions are chosen."""
    names = ["merged", "lara-recommended", "nystrom"]
    flags = ["--crops", "64", "80", "--groups", "5", "--repeats", "1"]
    out = tmp_path / "stage"
    assert main(["stage", *flags, "--estimators", *names, "--out", str(out)]) == 0
    assert "128 landmarks or 5 groups" in capsys.readouterr().out
    with open(f"{out}.csv", newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert [row["attention"] for row in rows] == 2 * ["exact", *names]
    assert [row["crop"] for row in rows] == 4 * ["64"] + 4 * ["80"]
    assert rows[0]["forward_speedup"] == rows[4]["forward_speedup"] == "1.000"
    assert all(float(row["both_ms"]) > 0 for row in rows)
