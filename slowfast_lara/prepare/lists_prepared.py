"""Lists and class names of a prepared dataset, converted from those of the source folder."""

from __future__ import annotations

import os
import re
import shutil
from functools import cache

from slowfast_lara.data.classes import DEFAULT_NAME
from slowfast_lara.data.lists import read_entries, read_lines
from slowfast_lara.errors import counted
from slowfast_lara.files import atomic_write, write_text

# Prefix of the official SSv2 files; not imported from data/ssv2.py, which imports PyTorch.
_SSV2 = "something-something-v2-"

_LABELS = re.compile(r'"?\d+(,\d+)*"?|""')  # one class, several, or none
# (canonical path of a video, label)
Entry = tuple[str, str]


def read_lists(folder: str, separator: str) -> dict[str, list[Entry]]:
    """Read the `path label` lists of a folder, as {split: entries}."""
    lists: dict[str, list[Entry]] = {}
    for split in ("train", "val", "test"):
        path = os.path.join(folder, f"{split}.csv")
        if not os.path.isfile(path):
            continue
        _, first_line = next(read_lines(path), (0, ""))
        if _LABELS.fullmatch(first_line.rpartition(separator)[2].strip()):
            entries = read_entries(path, separator, prefix="")
            lists[split] = [(canonical_path(video), label) for _, video, label in entries]
        else:  # not a `path label` list: annotations, or one line per frame
            print(f"{path}: no lines of 'path{separator}label'; not converted")
    return lists


def canonical_path(path: str) -> str:
    """Absolute path with symbolic links resolved in the folder, but not in the file name."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(_real_folder(folder), name)


_real_folder = cache(os.path.realpath)


def write_lists(
    lists: dict[str, list[Entry]], results: dict[str, str], out: str, separator: str
) -> None:
    """Write OUT/SPLIT.csv; `results` maps canonical source paths to prepared videos."""
    for split, entries in lists.items():
        lines = [
            f"{os.path.abspath(results[video])}{separator}{label}\n"
            for video, label in entries
            if video in results
        ]
        write_text(os.path.join(out, f"{split}.csv"), "".join(lines))
        print(f"{split}.csv: {counted(len(lines), 'video')}, {len(entries) - len(lines)} left out")


def copy_class_files(folder: str, out: str) -> None:
    """Copy classes.json and the official JSON files of Something-Something-v2."""
    for name in sorted(os.listdir(folder)):
        if name == DEFAULT_NAME or (name.startswith(_SSV2) and name.endswith(".json")):
            with atomic_write(os.path.join(out, name)) as temporary:
                shutil.copyfile(os.path.join(folder, name), temporary)
