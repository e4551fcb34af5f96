"""Predict all videos in a folder; write classes to a CSV file and features to an NPZ file.

python examples/predict_folder.py RUN FOLDER OUT

RUN is a run folder, a checkpoint or an exported folder. The output files are OUT.csv and OUT.npz.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

import slowfast_lara
from slowfast_lara.errors import DecodeError
from slowfast_lara.files import csv_cell

SUFFIXES = {".mp4", ".avi", ".mkv", ".mov", ".webm"}


def main(run: str, folder: str, out: str) -> None:
    if not Path(folder).is_dir():
        sys.exit(f"{folder}: not a folder")
    model = slowfast_lara.load(run)
    features = {}
    with open(f"{out}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["video", "class", "score"])
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix.lower() not in SUFFIXES:
                continue
            try:
                best = model(path, views=3).top(1)
                features[path.relative_to(folder).as_posix()] = model.features(path, views=3)
            except DecodeError as error:  # one bad video does not stop the others
                print(error, file=sys.stderr)
                continue
            row = [str(path), best.names[0], f"{best.scores[0]:.4f}"]
            writer.writerow(map(csv_cell, row))  # no formulas in spreadsheets
    np.savez(f"{out}.npz", **features)
    print(f"{len(features)} videos: {out}.csv, {out}.npz")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
