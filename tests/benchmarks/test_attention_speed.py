"""`python -m benchmarks stage`: which attentions are measured, and at which sizes."""

from __future__ import annotations

import csv

import pytest

from benchmarks.__main__ import main
from tests.cli.test_cli import code_of
from tests.helpers.small_models import only_error


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


@pytest.mark.parametrize(
    "words, allowed",
    [
        (["crop", "--crops", "32"], "at least 64"),
        (["stage", "--crops", "224", "100"], "multiple of 16"),
        (["length", "--lengths", "8"], "at least 16"),
        (["vjepa2", "--tokens", "100"], "at least 129"),
    ],
    ids=["crop", "stage", "length", "vjepa2"],
)
def test_sizes_with_fewer_tokens_than_landmarks(words, allowed, capsys):
    assert code_of(words, main) == 2
    assert f"{allowed}, got {words[-1]!r}" in only_error(capsys)


def test_the_smallest_crop(capsys):
    flags = ["--crops", "64", "--repeats", "1", "--estimators", "lara", "nystrom", "orthoformer"]
    assert main(["crop", *flags]) == 0
    out, err = capsys.readouterr()
    assert "orthoformer" in out
    # Progress: the attentions of a size before the first measurement, and a line for each.
    first, *lines = err.splitlines()
    assert first.startswith("64: ") and "lara" in first and "orthoformer" in first
    assert [line.split(":")[0] for line in lines[-3:]] == [
        f"64 {name}" for name in ("lara", "nystrom", "orthoformer")
    ]
    assert all(" ms" in line for line in lines)
