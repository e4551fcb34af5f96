"""Readers of `path label` lists, and search for the videos below a folder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slowfast_lara.data.text_files import open_text
from slowfast_lara.errors import DataError

if TYPE_CHECKING:
    from slowfast_lara.labels import Label

VIDEO_SUFFIXES = (
    *(".mp4", ".mkv", ".webm", ".avi", ".mov", ".flv", ".m4v", ".mpg", ".mpeg", ".ts", ".wmv"),
    *(".3gp", ".3g2", ".ogv", ".m2ts", ".mts", ".vob", ".asf"),
)

# Number of paths of a list to try in the working directory and in the list's folder.
PATHS_TRIED = 20


def read_path_labels(
    list_file: str, separator: str, num_classes: int, prefix: str, *, several: bool = False
) -> tuple[list[str], list[Label]]:
    """Read the paths and labels of a list; if `several`, a line can have several labels: 3,17."""
    paths: list[str] = []
    labels: list[Label] = []
    parse = parse_labels if several else parse_label
    for where, path, label in read_entries(list_file, separator, prefix):
        paths.append(path)
        labels.append(parse(label, num_classes, where))
    if not paths:
        raise DataError(f"{list_file}: empty; expected lines of 'path{separator}label'")
    return paths, labels


def read_entries(list_file: str, separator: str, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield (location, path, label) for each line; the location "FILE, line N" is for errors."""
    entries = _split_lines(list_file, separator)
    first = list(itertools.islice(entries, PATHS_TRIED))
    prefix = find_prefix(prefix, [path for _, path, _ in first], list_file)
    for where, path, label in itertools.chain(first, entries):
        yield where, os.path.join(prefix, path), label


def _split_lines(list_file: str, separator: str) -> Iterator[tuple[str, str, str]]:
    for number, line in read_lines(list_file):
        where = f"{list_file}, line {number}"
        path, _, label = (part.strip() for part in line.rpartition(separator))
        if not path:
            raise DataError(
                f"{where}: expected 'path{separator}label', got {line!r:.120}"
                f" (DATA.PATH_LABEL_SEPARATOR is {separator!r})"
            )
        yield where, path, label


def find_prefix(prefix: str, paths: Iterable[str], list_file: str) -> str:
    """The folder to prepend to relative paths of a list: `prefix` if it is not empty.

    Otherwise, try up to PATHS_TRIED `paths`, each in the working directory (as in PySlowFast) and
    then in the list's folder. The first file found decides: return "" if it is in the working
    directory, otherwise the list's folder. If no file is found, return the list's folder.
    """
    folder = os.path.dirname(list_file)
    if prefix:
        return prefix
    for path in itertools.islice(paths, PATHS_TRIED):
        if os.path.exists(path):
            return prefix
        if os.path.exists(os.path.join(folder, path)):
            return folder
    return folder


def read_lines(list_file: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the stripped text of each line that is not blank."""
    with open_text(list_file) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.strip()


def parse_label(text: str, num_classes: int, where: str, key: str = "MODEL.NUM_CLASSES") -> int:
    """Parse a class number below `num_classes`; `where` and the config `key` are for errors."""
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{where}: expected a class number as label, got {text!r:.60}") from None
    if not 0 <= label < num_classes:
        raise DataError(
            f"{where}: label {text:.60}; must be 0 to {num_classes - 1} ({key} is {num_classes})"
        )
    return label


def parse_labels(text: str, num_classes: int, where: str) -> tuple[int, ...]:
    """Parse comma-separated class numbers, which may be in quotes; () for an empty string."""
    numbers = text.replace('"', "")
    parts = numbers.split(",") if numbers else []
    return tuple(sorted({parse_label(part, num_classes, where) for part in parts}))


def fits_in_a_list(path: str) -> bool:
    """Whether a path is valid UTF-8 without line breaks."""
    return len(path.splitlines()) == 1 and path == path.encode(errors="ignore").decode()


def listed_videos_below(folder: str) -> Iterator[str]:
    """Like `videos_below`, but raise a DataError for paths that `fits_in_a_list` rejects."""
    for path in videos_below(folder):
        if not fits_in_a_list(path):
            raise DataError(f"{path!r}: paths in lists must be UTF-8 without line breaks")
        yield path


def videos_below(folder: str) -> Iterator[str]:
    """Yield the paths of all videos below a folder, without hidden files.

    Yields the videos of a folder in sorted order, then those of its subfolders. Follows symbolic
    links to other folders and visits each folder once. Raises a DataError for a folder that cannot
    be read.
    """
    top = os.path.realpath(folder)
    visited: set[str] = set()

    def should_visit(path: str) -> bool:
        real = os.path.realpath(path)
        # Skip links to a folder above `top` (a cycle) or below `top` (visited without the link).
        is_above_or_below = os.path.commonpath((top, real)) in (top, real)
        if real in visited or (os.path.islink(path) and is_above_or_below):
            return False
        visited.add(real)
        return True

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = [name for name in sorted(folders) if should_visit(os.path.join(parent, name))]
        for name in sorted(names):
            if name.lower().endswith(VIDEO_SUFFIXES) and name[0] != ".":
                yield os.path.join(parent, name)
