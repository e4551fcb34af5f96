"""Predictions as JSON and CSV, written as they come and renamed at the end."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Sequence
from typing import Any, TextIO

from slowfast_lara.files import atomic_text
from slowfast_lara.inference.prediction import Ranking


class PredictionFiles:
    """Context manager: rows go to a JSON and a CSV file, where these are wanted.

    JSON: {"checkpoint": ..., ROWS: [{..., "top5": [...], "top5_names": [...],
    "top5_scores": [...]}, ...], "failed": [{"path": ..., "reason": ...}, ...]}.
    CSV: a line for each of the five, and one with the reason for each that failed.
    """

    def __init__(
        self,
        json_path: str | None,
        csv_path: str | None,
        *,
        checkpoint: str,
        rows: str,
        columns: Sequence[str],
    ) -> None:
        self._paths = json_path, csv_path
        self._head = json.dumps({"checkpoint": checkpoint})[:-1] + f', "{rows}": ['
        self._columns = list(columns)
        self._failed: list[dict[str, str]] = []
        self._json: TextIO | None = None
        self._csv: Any = None
        self._separator = "\n"

    def __enter__(self) -> PredictionFiles:
        self._files = contextlib.ExitStack()
        # The name of a video may hold bytes of any kind.
        json_file, csv_file = (
            self._files.enter_context(atomic_text(path, "backslashreplace")) if path else None
            for path in self._paths
        )
        if json_file:
            self._json = json_file
            json_file.write(self._head)
        if csv_file:
            self._csv = csv.writer(csv_file, lineterminator="\n")
            self._csv.writerow([*self._columns, "rank", "class", "name", "score", "error"])
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._json and kind is None:
            self._json.write(f'\n], "failed": {json.dumps(self._failed)}}}\n')
        self._files.__exit__(kind, error, traceback)

    def add(self, known: Sequence[Any], ranking: Ranking) -> None:
        """`known`: the values of the columns."""
        if self._json:
            row = {
                **dict(zip(self._columns, known)),
                "top5": ranking.classes,
                "top5_names": ranking.names,
                "top5_scores": ranking.scores,
            }
            self._json.write(self._separator + json.dumps(row))
            self._separator = ",\n"
        if self._csv:
            self._csv.writerows(
                [*known, place, *entry, ""] for place, entry in enumerate(zip(*ranking), start=1)
            )

    def fail(self, path: str, reason: str) -> None:
        self._failed.append({"path": path, "reason": reason})
        if self._csv:
            blank = [""] * (len(self._columns) - 1 + 4)
            self._csv.writerow([path, *blank, reason])
