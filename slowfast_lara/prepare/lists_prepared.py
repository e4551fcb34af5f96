"""The lists and class names of a set, for its prepared videos."""

from __future__ import annotations

import os
import shutil
from functools import cache
from typing import NamedTuple

from slowfast_lara.data.classes import DEFAULT_NAME
from slowfast_lara.data.lists import find_prefix, read_lines
from slowfast_lara.errors import DataError
from slowfast_lara.files import atomic_write, write_text

SPLITS = ("train", "val", "test")
# How the official files of Something-Something-v2 start: data/ssv2.py, which takes long to load.
_SSV2 = "something-something-v2-"


class Entry(NamedTuple):
    """A line of a list."""

    place: str  # of the video: see place_of
    label: str


def read_lists(folder: str, separator: str) -> dict[str, list[Entry]]:
    """The `path label` lists of a folder, by split."""
    lists: dict[str, list[Entry]] = {}
    for split in SPLITS:
        path = os.path.join(folder, f"{split}.csv")
        if not os.path.isfile(path):
            continue
        entries = _read_list(path, separator)
        if entries is None:
            print(f"{path}: no lines of 'path{separator}label'; it is not carried over")
        else:
            lists[split] = entries
    return lists


def _read_list(path: str, separator: str) -> list[Entry] | None:
    """None if its first line is not `path label`: annotations, or a list of frames."""
    entries: list[Entry] = []
    prefix = ""
    for number, line in read_lines(path):
        video, found, label = line.rpartition(separator)
        if not found or not label.strip().isdigit():
            if not entries:
                return None
            raise DataError(
                f"{path}, line {number}: 'path{separator}label' is expected, not {line!r:.120}"
            )
        if not entries:
            prefix = find_prefix("", video.strip(), path)
        entries.append(Entry(place_of(os.path.join(prefix, video.strip())), label.strip()))
    return entries or None


def place_of(path: str) -> str:
    """By what two paths of a video are compared: links to folders followed."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(_real_folder(folder), name)


@cache
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def write_lists(
    lists: dict[str, list[Entry]], results: dict[str, str], out: str, separator: str
) -> None:
    """OUT/SPLIT.csv with the results (by place of the source); what has none is left out."""
    for split, entries in lists.items():
        lines = [
            f"{os.path.abspath(results[entry.place])}{separator}{entry.label}\n"
            for entry in entries
            if entry.place in results
        ]
        write_text(os.path.join(out, f"{split}.csv"), "".join(lines))
        print(f"{split}.csv: {len(lines)} videos, {len(entries) - len(lines)} left out")


def copy_class_files(folder: str, out: str) -> None:
    """classes.json and the official files of Something-Something-v2."""
    for name in sorted(os.listdir(folder)):
        if name == DEFAULT_NAME or (name.startswith(_SSV2) and name.endswith(".json")):
            with atomic_write(os.path.join(out, name)) as aside:
                shutil.copyfile(os.path.join(folder, name), aside)
