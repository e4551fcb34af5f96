"""Lists of videos: reading `path label` lines, finding videos."""

from __future__ import annotations

import os
from collections.abc import Iterator

from slowfast_lara.errors import DataError
from slowfast_lara.files import check_regular_file

VIDEO_SUFFIXES = (
    *(".mp4", ".mkv", ".webm", ".avi", ".mov", ".flv", ".m4v", ".mpg", ".mpeg", ".ts", ".wmv"),
    *(".3gp", ".3g2", ".ogv", ".m2ts", ".mts", ".vob", ".asf"),
)


def read_path_labels(
    list_file: str, separator: str, num_classes: int, prefix: str
) -> tuple[list[str], list[int]]:
    """Paths and labels of a list."""
    paths: list[str] = []
    labels: list[int] = []
    for number, line in read_lines(list_file):
        where = f"{list_file}, line {number}"
        path, label = split_line(line, separator, where)
        paths.append(path)
        labels.append(parse_label(label, num_classes, where))
    if not paths:
        raise DataError(f"{list_file}: empty; lines of 'path{separator}label' are expected")
    prefix = find_prefix(prefix, paths[0], list_file)
    return [os.path.join(prefix, path) for path in paths], labels


def split_line(line: str, separator: str, where: str) -> tuple[str, str]:
    """Path and label of a line, or a DataError that says `where`."""
    path, found, label = line.rpartition(separator)
    if not found or not path.strip():
        raise DataError(
            f"{where}: 'path{separator}label' is expected, not {line!r:.120}"
            f" (DATA.PATH_LABEL_SEPARATOR is {separator!r})"
        )
    return path.strip(), label


def find_prefix(prefix: str, first_path: str, list_file: str) -> str:
    """The folder that relative paths of a list start from: the prefix of the config.

    Where that is empty, it is the working directory, as in PySlowFast, or the list's
    folder if the first path is not found from there.
    """
    if prefix or os.path.exists(first_path):
        return prefix
    return os.path.dirname(list_file)


def read_lines(list_file: str) -> Iterator[tuple[int, str]]:
    """Number and content of the lines that are not blank."""
    try:
        check_regular_file(list_file)
        with open(list_file, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise DataError(f"cannot read the list {list_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{list_file}: UTF-8 text is expected ({error.reason})") from None


def parse_label(text: str, num_classes: int, where: str) -> int:
    """A class number, or a DataError that says `where`."""
    try:
        label = int(text)
    except ValueError:
        raise DataError(f"{where}: a class number is expected as label, not {text!r:.60}") from None
    if not 0 <= label < num_classes:
        raise DataError(
            f"{where}: label {text.strip():.60}; 0 to {num_classes - 1} are expected"
            f" (MODEL.NUM_CLASSES is {num_classes})"
        )
    return label


def fits_in_a_list(path: str) -> bool:
    """Whether it is one line of UTF-8."""
    return len(path.splitlines()) == 1 and path == path.encode(errors="ignore").decode()


def listed_videos_below(folder: str) -> Iterator[str]:
    """As `videos_below`; a DataError for a path that does not fit in a list."""
    for path in videos_below(folder):
        if not fits_in_a_list(path):
            raise DataError(f"{path!r}: a path with line breaks, or not of UTF-8, fits in no list")
        yield path


def videos_below(folder: str) -> Iterator[str]:
    """The paths of all videos below the folder, sorted; hidden files are not meant.

    Links to folders elsewhere are followed, and each folder is visited once. A DataError for
    a folder that cannot be read.
    """
    top = os.path.realpath(folder)
    seen: set[str] = set()

    def wanted(path: str) -> bool:
        real = os.path.realpath(path)
        # A link to a folder above or below leads to what is visited by its own name.
        around = os.path.commonpath((top, real)) in (top, real)
        if real in seen or (os.path.islink(path) and around):
            return False
        seen.add(real)
        return True

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in sorted(folders) if wanted(os.path.join(parent, name))]
        for name in sorted(names):
            if name.lower().endswith(VIDEO_SUFFIXES) and name[0] != ".":
                yield os.path.join(parent, name)
