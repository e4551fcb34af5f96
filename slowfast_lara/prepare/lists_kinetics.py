"""PySlowFast's lists for Kinetics, from the official annotations and a folder of videos."""

from __future__ import annotations

import csv
import os

from slowfast_lara.data.lists import VIDEO_SUFFIXES, listed_videos_below
from slowfast_lara.errors import DataError
from slowfast_lara.files import write_json, write_text

COLUMNS = ("label", "youtube_id", "time_start", "time_end")


def read_annotations(path: str) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise DataError(
                    f"{path}, line 1: columns {', '.join(COLUMNS)} are expected; "
                    f"{', '.join(missing)} not found"
                )
            return list(reader)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def find_videos(folder: str) -> dict[str, str]:
    """The path of every video below the folder, by its name without suffix."""
    found: dict[str, str] = {}
    for path in listed_videos_below(folder):
        found.setdefault(os.path.splitext(os.path.basename(path))[0], os.path.abspath(path))
    if not found:
        raise DataError(f"{folder}: no videos ({', '.join(VIDEO_SUFFIXES)}) below it")
    return found


def clip_name(row: dict[str, str], where: str) -> str:
    """ID_START_END."""
    try:
        start, end = round(float(row["time_start"])), round(float(row["time_end"]))
    except (TypeError, ValueError):
        raise DataError(
            f"{where}: numbers are expected as time_start and time_end, not "
            f"{row['time_start']!r} and {row['time_end']!r}"
        ) from None
    return f"{row['youtube_id']}_{start:06d}_{end:06d}"


def write_lists(folder: str, out: str, annotations: dict[str, str], separator: str) -> None:
    """OUT/SPLIT.csv and missing_SPLIT.txt for each annotation file, and classes.json."""
    rows = {split: read_annotations(path) for split, path in annotations.items()}
    videos = find_videos(folder)
    classes = sorted({row["label"] for split in rows for row in rows[split]})
    number_of = {name: number for number, name in enumerate(classes)}
    write_json(os.path.join(out, "classes.json"), classes)
    for split, entries in rows.items():
        found, missing = [], []
        for line, row in enumerate(entries, start=2):
            name = clip_name(row, f"{annotations[split]}, line {line}")
            path = videos.get(name) or videos.get(row["youtube_id"])
            if path:
                found.append(f"{path}{separator}{number_of[row['label']]}\n")
            else:
                missing.append(f"{name}\n")
        write_text(os.path.join(out, f"{split}.csv"), "".join(found))
        write_text(os.path.join(out, f"missing_{split}.txt"), "".join(missing))
        print(f"{split}: {len(found)} of {len(entries)} videos found, {len(missing)} missing")
    print(f"{len(classes)} classes: MODEL.NUM_CLASSES")
