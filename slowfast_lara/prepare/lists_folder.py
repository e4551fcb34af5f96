"""Lists of your own videos: one folder per class, named as the class.

A tenth of each class tests, a tenth validates (at least one video each), the rest
trains; which, follows from the names alone. Classes are numbered in alphabetical
order.
"""

from __future__ import annotations

import os
import random

from slowfast_lara.data.lists import VIDEO_SUFFIXES, listed_videos_below
from slowfast_lara.errors import DataError
from slowfast_lara.files import write_json, write_text


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
    videos = {name: list(listed_videos_below(os.path.join(folder, name))) for name in names}
    for name, paths in videos.items():
        if len(paths) < 3:
            raise DataError(
                f"{os.path.join(folder, name)}: {len(paths)} videos "
                f"({', '.join(VIDEO_SUFFIXES)}) below it; at least 3 are expected, "
                "one each to train, validate and test"
            )
    _check_one_class(videos)
    return videos


def _check_one_class(videos: dict[str, list[str]]) -> None:
    """A DataError if a video is in two classes, by a link."""
    found: dict[str, tuple[str, str]] = {}
    for name, paths in videos.items():
        for path in paths:
            other, place = found.setdefault(os.path.realpath(path), (name, path))
            if other != name:
                raise DataError(f"{place} and {path} are one video in two classes")


def split(videos: list[str]) -> dict[str, list[str]]:
    shuffled = random.Random(0).sample(videos, len(videos))
    share = max(1, len(videos) // 10)
    return {
        "test": shuffled[:share],
        "val": shuffled[share : 2 * share],
        "train": shuffled[2 * share :],
    }


def write_lists(folder: str, out: str) -> None:
    """OUT/{train,val,test}.csv and classes.json from a folder with a folder for each class."""
    videos = classes_of(folder)
    lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for label, paths in enumerate(videos.values()):
        for name, chosen in split(paths).items():
            lists[name] += [f"{os.path.abspath(path)} {label}\n" for path in chosen]
    write_json(os.path.join(out, "classes.json"), list(videos))
    for name, lines in lists.items():
        write_text(os.path.join(out, f"{name}.csv"), "".join(lines))
        print(f"{name}: {len(lines)} videos")
    print(f"{len(videos)} classes: MODEL.NUM_CLASSES")
