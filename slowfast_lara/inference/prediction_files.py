"""JSON, CSV and NumPy files of predictions."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slowfast_lara.files import atomic_text, atomic_write, csv_cell
from slowfast_lara.inference.prediction import Ranking

# Path, scores, features, and number of views of a video.
ArrayRow = tuple[str, np.ndarray, np.ndarray, int]


@contextlib.contextmanager
def prediction_arrays(
    path: str, class_names: Sequence[str], num_features: int
) -> Iterator[list[ArrayRow]]:
    """Yield a list of rows to fill; write them to an NPZ file when the context ends without error.

    Arrays: paths [videos], scores float32 [videos, classes], features float32 [videos, D],
    num_views [videos], class_names [classes]. Failed videos are left out.
    """
    rows: list[ArrayRow] = []
    # Open the file now, so that an unwritable path is reported before any video is read.
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        yield rows
        paths, scores, features, num_views = zip(*rows) if rows else ((),) * 4
        np.savez(
            file,
            paths=np.array(paths, str),
            scores=np.array(scores, np.float32).reshape(-1, len(class_names)),
            features=np.array(features, np.float32).reshape(-1, num_features),
            num_views=np.array(num_views, int),
            class_names=np.array(class_names, str),
        )


class PredictionFiles:
    """Context manager that writes predictions to a JSON and a CSV file; each path may be None.

    JSON: {"checkpoint": ..., "videos" or "windows": [{"path": ..., "top5": [...],
    "top5_names": [...], "top5_scores": [...]}, ...], "failed": [{"path": ..., "reason": ...}]}.
    A video also has "num_views", a window "start" and "end" in seconds.
    CSV: one line for each of the top 5 classes of a video or window, one line with the error per
    failed video.
    Text that a spreadsheet would run as a formula is quoted, see `csv_cell`.
    If the model predicts verbs and nouns, a class is a pair: [verb, noun] in JSON, "3 17" in CSV.
    The JSON object of a video then also has the top 5 verbs in "verb" and nouns in "noun".
    """

    def __init__(
        self, json_path: str | None, csv_path: str | None, checkpoint: str, *, windows: bool
    ) -> None:
        self._paths = json_path, csv_path
        self._columns = ["path", "start", "end"] if windows else ["path", "num_views"]
        rows = "windows" if windows else "videos"
        self._head = json.dumps({"checkpoint": checkpoint})[:-1] + f', "{rows}": ['
        self._failed: list[dict[str, str]] = []
        self._separator = "\n"

    def __enter__(self) -> PredictionFiles:
        self._files = contextlib.ExitStack()
        # A video path may contain bytes that are not UTF-8; they are written as escapes.
        self._json, csv_file = (
            self._files.enter_context(atomic_text(path, "backslashreplace")) if path else None
            for path in self._paths
        )
        self._write_json(self._head)
        self._csv: Any = csv.writer(csv_file, lineterminator="\n") if csv_file else None
        if self._csv:
            self._csv.writerow([*self._columns, "rank", "class", "name", "score", "error"])
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self._write_json(f'\n], "failed": {json.dumps(self._failed)}}}\n')
        self._files.__exit__(kind, error, traceback)

    def _write_json(self, text: str) -> None:
        if self._json:
            self._json.write(text)

    def add(
        self, values: Sequence[Any], ranking: Ranking, parts: Mapping[str, Ranking] | None = None
    ) -> None:
        """Add a video or window; `values` fill the columns before "rank"."""
        by_part = {name: part.to_dict() for name, part in (parts or {}).items()}
        row = {**dict(zip(self._columns, values)), **ranking.to_dict(), **by_part}
        self._write_json(self._separator + json.dumps(row))
        self._separator = ",\n"
        if self._csv:
            for number, (label, *rest) in enumerate(zip(*ranking), start=1):
                text = " ".join(map(str, label)) if isinstance(label, tuple) else label
                self._csv.writerow(map(csv_cell, [*values, number, text, *rest, ""]))

    def fail(self, path: str, reason: str) -> None:
        self._failed.append({"path": path, "reason": reason})
        if self._csv:
            blank = [""] * (len(self._columns) - 1 + 4)
            self._csv.writerow(map(csv_cell, [path, *blank, reason]))
