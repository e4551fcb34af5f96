"""Makes lists from your own videos: one folder per class, named as the class.

    python datasets/build_folder_lists.py VIDEOS OUT

A tenth of each class tests, a tenth validates (at least one video each), the rest
trains; which, follows from the names alone. Classes are numbered in alphabetical
order. OUT gets train.csv, val.csv, test.csv (`path label`) and classes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys

from slowfast_lara.data.errors import DataError
from slowfast_lara.data.lists import VIDEO_SUFFIXES, videos_below, write_text


def classes_of(folder: str) -> dict[str, list[str]]:
    """The videos of each class."""
    try:
        names = sorted(
            entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."
        )
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}") from None
    if not names:
        raise DataError(f"{folder}: one folder per class is expected in it")
    videos = {name: list(videos_below(os.path.join(folder, name))) for name in names}
    for name, paths in videos.items():
        if len(paths) < 3:
            raise DataError(
                f"{os.path.join(folder, name)}: {len(paths)} videos "
                f"({', '.join(VIDEO_SUFFIXES)}) below it; at least 3 are expected, "
                "one each to train, validate and test"
            )
    return videos


def split(videos: list[str]) -> dict[str, list[str]]:
    shuffled = random.Random(0).sample(videos, len(videos))
    share = max(1, len(videos) // 10)
    return {
        "test": shuffled[:share],
        "val": shuffled[share : 2 * share],
        "train": shuffled[2 * share :],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("videos", help="the folder with a folder for each class")
    parser.add_argument("out", help="the folder for the lists: DATA.PATH_TO_DATA_DIR")
    args = parser.parse_args(argv)
    videos = classes_of(args.videos)
    lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for label, paths in enumerate(videos.values()):
        for name, chosen in split(paths).items():
            lists[name] += [f"{os.path.abspath(path)} {label}\n" for path in chosen]
    os.makedirs(args.out, exist_ok=True)
    write_text(os.path.join(args.out, "classes.json"), json.dumps(list(videos), indent=1) + "\n")
    for name, lines in lists.items():
        write_text(os.path.join(args.out, f"{name}.csv"), "".join(lines))
        print(f"{name}: {len(lines)} videos")
    print(f"{len(videos)} classes: MODEL.NUM_CLASSES")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
