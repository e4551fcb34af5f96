"""Runs of `slowfast-lara data prepare`, and their results."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from tests.helpers.commands import data as main

QUICK = ("--short-side", "32", "--preset", "ultrafast", "--jobs", "2")


def prepare(videos: Path, out: Path, *options: str) -> int:
    return main(["prepare", str(videos), str(out), *QUICK, *options])


def failures(out: Path) -> dict[str, tuple[str, str]]:
    """Rows of failures.csv by file name: "yes" or "no" for prepared, and the reason."""
    with open(out / "failures.csv", newline="") as file:
        return {
            os.path.basename(row["video"]): (row["prepared"], row["reason"])
            for row in csv.DictReader(file)
        }


def results(out: Path) -> list[Path]:
    return [path for path in out.rglob("*.mp4") if not path.name.startswith(".writing-")]
