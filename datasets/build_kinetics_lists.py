"""Makes PySlowFast's lists for Kinetics from the official annotations and a folder.

    python datasets/build_kinetics_lists.py VIDEOS OUT --train train.csv --val val.csv

The annotation files have a header with `label`, `youtube_id`, `time_start` and
`time_end`. Videos are found anywhere below VIDEOS as ID_START_END.mp4 (six digits
each, as the official downloads) or ID.mp4, whatever the suffix. Classes are
numbered in alphabetical order. OUT gets train.csv, val.csv, test.csv (`path
label`), classes.json, and missing_train.txt and so on with what was not found.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys

from slowfast_lara.data.errors import DataError
from slowfast_lara.data.lists import VIDEO_SUFFIXES, videos_below, write_text

SPLITS = ("train", "val", "test")
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
    for path in videos_below(folder):
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("videos", help="the folder with the videos")
    parser.add_argument("out", help="the folder for the lists: DATA.PATH_TO_DATA_DIR")
    for split in SPLITS:
        parser.add_argument(f"--{split}", metavar="FILE", help=f"annotations of {split}")
    parser.add_argument("--separator", default=" ", help="DATA.PATH_LABEL_SEPARATOR")
    args = parser.parse_args(argv)
    rows = {
        split: read_annotations(getattr(args, split)) for split in SPLITS if getattr(args, split)
    }
    if not rows:
        parser.error("at least one of --train, --val and --test is expected")
    videos = find_videos(args.videos)
    classes = sorted({row["label"] for split in rows for row in rows[split]})
    number_of = {name: number for number, name in enumerate(classes)}
    os.makedirs(args.out, exist_ok=True)
    write_text(os.path.join(args.out, "classes.json"), json.dumps(classes, indent=1) + "\n")
    for split, entries in rows.items():
        found, missing = [], []
        for line, row in enumerate(entries, start=2):
            name = clip_name(row, f"{getattr(args, split)}, line {line}")
            path = videos.get(name) or videos.get(row["youtube_id"])
            if path:
                found.append(f"{path}{args.separator}{number_of[row['label']]}\n")
            else:
                missing.append(f"{name}\n")
        write_text(os.path.join(args.out, f"{split}.csv"), "".join(found))
        write_text(os.path.join(args.out, f"missing_{split}.txt"), "".join(missing))
        print(f"{split}: {len(found)} of {len(entries)} videos found, {len(missing)} missing")
    print(f"{len(classes)} classes: MODEL.NUM_CLASSES")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
