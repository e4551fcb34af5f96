"""Lists of extracted frames, of PySlowFast's form for Something-Something-v2: a line a frame.

Such a list has millions of lines. Plain ones are taken apart by numpy, a few megabytes at a
time, and blank ones passed over; as soon as one is not plain (a tab, two spaces, letters beyond
ASCII, frames out of order, a mistake) the whole list is read line by line, which allows more
and names the mistake.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slowfast_lara.data.lists import read_lines
from slowfast_lara.data.string_array import Texts
from slowfast_lara.errors import DataError
from slowfast_lara.files import check_regular_file

HEADER = "original_vido_id video_id frame_id path labels"
_BYTES_AT_A_TIME = 1 << 24
_LONGEST_NAME, _MOST_DIGITS = 32, 18
_NEWLINE, _SPACE, _ZERO, _TILDE = b"\n 0~"


class FrameList(NamedTuple):
    """The videos of a list, and of each the paths of its frames in order, with line breaks."""

    names: list[str]
    paths: Texts


class _NotPlain(Exception):
    """Lines that have to be read one by one."""


def has_header(list_file: str) -> bool:
    return next(read_lines(list_file), (1, ""))[1].startswith(HEADER.split()[0])


def read_frame_list(list_file: str) -> FrameList:
    """The frames of every video, in order."""
    if not has_header(list_file):
        raise DataError(
            f"{list_file}, line 1: the header {HEADER!r} is expected; without "
            f"this file, the videos are DATA.PATH_PREFIX/ID.webm"
        )
    try:
        names, paths = _read_plain(list_file)
    except _NotPlain:
        names, paths = _read_one_by_one(list_file)
    if not names:
        raise DataError(f"{list_file}: empty; lines of {HEADER!r} are expected")
    if len(set(names)) < len(names):
        again = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"{list_file}: the frames of video {again} do not stand together")
    return FrameList(names, paths)


def _read_one_by_one(list_file: str) -> FrameList:
    names, texts = [], []
    for name, rows in itertools.groupby(_rows(list_file), key=lambda row: row[0]):
        names.append(name)
        texts.append("".join(f"{path}\n" for _, _, path in sorted(rows)))
    return FrameList(names, Texts.of(texts))


def _rows(list_file: str) -> Iterator[tuple[str, int, str]]:
    """Video, number of the frame, path."""
    for number, line in itertools.islice(read_lines(list_file), 1, None):
        fields = line.split(None, 3)
        path, *labels = fields[-1].rsplit(None, 1)
        numbered = len(fields) == 4 and len(fields[2]) < 19 and fields[2].isdecimal()
        if not numbered or not labels:
            raise DataError(
                f"{list_file}, line {number}: {HEADER!r} is expected, not {line!r:.120}"
            )
        yield fields[0], int(fields[2]), path


def _read_plain(list_file: str) -> FrameList:
    names: list[str] = []
    block = bytearray()
    ends: list[np.ndarray] = []  # of the texts of the videos before, in the block
    last_frame = -1
    for chunk in _chunks(list_file):
        lines = _Lines(chunk)
        firsts = lines.where_names_change(names[-1] if names else "")
        last_frame = _check_order(lines.frames, firsts, last_frame)
        paths, starts = lines.paths()
        ends.append(len(block) + starts[firsts])
        names += [lines.name(first) for first in firsts]
        block += paths
    if not names:
        return FrameList([], Texts.of([]))
    return FrameList(names, Texts(block, np.concatenate([*ends, [len(block)]])[1:]))


def _chunks(list_file: str) -> Iterator[bytes]:
    """Whole lines, without the header."""
    try:
        check_regular_file(list_file)
        with open(list_file, "rb") as file:
            if not file.readline().startswith(HEADER.encode()):  # a blank line, or a mark
                raise _NotPlain
            while chunk := file.read(_BYTES_AT_A_TIME):
                lines = (chunk + file.readline()).replace(b"\r\n", b"\n")
                while b"\n\n" in lines:  # blank lines
                    lines = lines.replace(b"\n\n", b"\n")
                if lines := lines.strip(b"\n"):
                    yield lines + b"\n"
    except OSError as error:
        raise DataError(f"cannot read the list {list_file}: {error.strerror}") from None


def _check_order(frames: np.ndarray, firsts: np.ndarray, last_frame: int) -> int:
    """_NotPlain where the frames of a video are not in order; the last one."""
    is_later = np.diff(frames, prepend=last_frame) > 0
    is_later[firsts] = True
    if not is_later.all():
        raise _NotPlain
    return int(frames[-1])


class _Lines:
    """Lines of five fields or more, with one space between them; else _NotPlain."""

    def __init__(self, chunk: bytes) -> None:
        self._bytes = content = np.frombuffer(chunk, np.uint8)
        if content.max() > _TILDE or ((content < _SPACE) & (content != _NEWLINE)).any():
            raise _NotPlain
        self._ends = np.flatnonzero(content == _NEWLINE)
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])
        spaces = np.flatnonzero(content == _SPACE)
        first = np.searchsorted(spaces, self._starts)
        behind = np.searchsorted(spaces, self._ends)
        if (behind - first < 4).any() or (np.diff(spaces) == 1).any():
            raise _NotPlain
        self._name_ends = spaces[first]
        self._path_starts, self._path_ends = spaces[first + 2] + 1, spaces[behind - 1]
        at_an_edge = (self._name_ends == self._starts) | (self._path_ends == self._ends - 1)
        if at_an_edge.any():
            raise _NotPlain
        self.frames = self._numbers(spaces[first + 1] + 1, spaces[first + 2])

    def _numbers(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The whole numbers that stand there."""
        values = np.zeros(len(starts), np.int64)
        most = int((ends - starts).max())
        if most > _MOST_DIGITS:
            raise _NotPlain
        for place in range(most):
            is_there = starts + place < ends
            digits = self._bytes[np.minimum(starts + place, ends)].astype(np.int64) - _ZERO
            if ((digits < 0) | (digits > 9))[is_there].any():
                raise _NotPlain
            values = np.where(is_there, values * 10 + digits, values)
        return values

    def name(self, line: int) -> str:
        return self._bytes[self._starts[line] : self._name_ends[line]].tobytes().decode()

    def where_names_change(self, last: str) -> np.ndarray:
        """The lines whose name is not that of the line before; `last` stands before the first."""
        lengths = self._name_ends - self._starts
        if lengths.max() > _LONGEST_NAME:
            raise _NotPlain
        changes = np.diff(lengths, prepend=-1) != 0
        for place in range(int(lengths.max())):
            letters = self._bytes[np.minimum(self._starts + place, self._name_ends)]
            changes |= np.diff(letters, prepend=0) != 0
        changes[0] = self.name(0) != last
        return np.flatnonzero(changes)

    def paths(self) -> tuple[bytes, np.ndarray]:
        """All paths, a line each, and where each one starts."""
        edges = np.zeros(len(self._bytes) + 1, np.int8)
        edges[self._path_starts] += 1
        edges[self._path_ends] -= 1
        is_kept = np.cumsum(edges[:-1], dtype=np.int8).view(bool)
        is_kept[self._ends] = True
        lengths = self._path_ends - self._path_starts + 1
        return self._bytes[is_kept].tobytes(), np.cumsum(lengths) - lengths
