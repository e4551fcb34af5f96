"""Lists of extracted frames in PySlowFast's form for Something-Something-v2: one line per frame.

Such a list has millions of lines. NumPy parses it in chunks of a few megabytes. If any line is not
plain (tabs, double spaces, non-ASCII characters, frames out of order, errors), the list is parsed
line by line instead, which accepts more and reports the number of a wrong line.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from slowfast_lara.data.lists import read_lines
from slowfast_lara.data.string_array import StringArray
from slowfast_lara.errors import DataError
from slowfast_lara.files import check_regular_file

HEADER = "original_vido_id video_id frame_id path labels"
CHUNK_BYTES = 1 << 24
_MAX_NAME, _MAX_DIGITS = 32, 18
_NEWLINE, _SPACE, _ZERO, _TILDE = b"\n 0~"


class FrameList(NamedTuple):
    """Videos of a list; for each, the paths of its frames in order, one per line."""

    names: list[str]
    paths: StringArray


class NotPlain(Exception):
    """A line that only the line-by-line parser accepts."""


def has_header(list_file: str) -> bool:
    return next(read_lines(list_file), (1, ""))[1].startswith(HEADER.split()[0])


def read_frame_list(list_file: str) -> FrameList:
    """The frames of every video, in order."""
    if not has_header(list_file):
        raise DataError(
            f"{list_file}, line 1: expected the header {HEADER!r}; without "
            f"this file, the videos are DATA.PATH_PREFIX/ID.webm"
        )
    try:
        names, paths = parse_chunks(list_file)
    except NotPlain:
        names, paths = parse_lines(list_file)
    if not names:
        raise DataError(f"{list_file}: empty; expected lines of {HEADER!r}")
    if len(set(names)) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"{list_file}: the frames of video {repeated} must be consecutive lines")
    return FrameList(names, paths)


def parse_lines(list_file: str) -> FrameList:
    names, texts = [], []
    for name, rows in itertools.groupby(_rows(list_file), key=lambda row: row[0]):
        names.append(name)
        texts.append("".join(f"{path}\n" for _, _, path in sorted(rows)))
    return FrameList(names, StringArray.of(texts))


def _rows(list_file: str) -> Iterator[tuple[str, int, str]]:
    """Video name, frame number and path of each line."""
    for number, line in itertools.islice(read_lines(list_file), 1, None):
        fields = line.split(None, 3)
        path, *labels = fields[-1].rsplit(None, 1)
        numbered = len(fields) == 4 and len(fields[2]) <= _MAX_DIGITS and fields[2].isdecimal()
        if not numbered or not labels:
            raise DataError(f"{list_file}, line {number}: expected {HEADER!r}, got {line!r:.120}")
        yield fields[0], int(fields[2]), path


def parse_chunks(list_file: str) -> FrameList:
    names: list[str] = []
    block = bytearray()
    starts: list[np.ndarray] = []  # of the videos' paths, in the block
    last_frame = -1
    for chunk in _chunks(list_file):
        lines = _Lines(chunk)
        firsts = lines.name_changes(names[-1] if names else "")
        is_later = np.diff(lines.frames, prepend=last_frame) > 0
        is_later[firsts] = True
        if not is_later.all():
            raise NotPlain
        last_frame = int(lines.frames[-1])
        paths, path_starts = lines.paths()
        starts.append(len(block) + path_starts[firsts])
        names += [lines.name(first) for first in firsts]
        block += paths
    if not names:
        return FrameList([], StringArray.of([]))
    return FrameList(names, StringArray(block, np.concatenate([*starts, [len(block)]])[1:]))


def _chunks(list_file: str) -> Iterator[bytes]:
    """Whole lines, without the header and blank lines."""
    try:
        check_regular_file(list_file)
        with open(list_file, "rb") as file:
            if not file.readline().startswith(HEADER.encode()):  # a blank line or a BOM
                raise NotPlain
            while chunk := file.read(CHUNK_BYTES):
                lines = (chunk + file.readline()).replace(b"\r\n", b"\n")
                while b"\n\n" in lines:
                    lines = lines.replace(b"\n\n", b"\n")
                if lines := lines.strip(b"\n"):
                    yield lines + b"\n"
    except OSError as error:
        raise DataError(f"cannot read the list {list_file}: {error.strerror}") from None


class _Lines:
    """Lines of at least five fields, separated by single spaces; otherwise raises NotPlain."""

    def __init__(self, chunk: bytes) -> None:
        self._bytes = content = np.frombuffer(chunk, np.uint8)
        if content.max() > _TILDE or ((content < _SPACE) & (content != _NEWLINE)).any():
            raise NotPlain
        self._ends = np.flatnonzero(content == _NEWLINE)
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])
        spaces = np.flatnonzero(content == _SPACE)
        first = np.searchsorted(spaces, self._starts)
        behind = np.searchsorted(spaces, self._ends)
        if (behind - first < 4).any() or (np.diff(spaces) == 1).any():
            raise NotPlain
        self._name_ends = spaces[first]
        self._path_starts, self._path_ends = spaces[first + 2] + 1, spaces[behind - 1]
        has_outer_space = (self._name_ends == self._starts) | (self._path_ends == self._ends - 1)
        if has_outer_space.any():
            raise NotPlain
        self.frames = self._integers(spaces[first + 1] + 1, spaces[first + 2])

    def _integers(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        values = np.zeros(len(starts), np.int64)
        length = int((ends - starts).max())
        if length > _MAX_DIGITS:
            raise NotPlain
        for position in range(length):
            is_inside = starts + position < ends
            digits = self._bytes[np.minimum(starts + position, ends)].astype(np.int64) - _ZERO
            if ((digits < 0) | (digits > 9))[is_inside].any():
                raise NotPlain
            values = np.where(is_inside, values * 10 + digits, values)
        return values

    def name(self, line: int) -> str:
        return self._bytes[self._starts[line] : self._name_ends[line]].tobytes().decode()

    def name_changes(self, last: str) -> np.ndarray:
        """The lines whose name differs from the line before; `last` precedes the first line."""
        lengths = self._name_ends - self._starts
        if lengths.max() > _MAX_NAME:
            raise NotPlain
        changes = np.diff(lengths, prepend=-1) != 0
        for position in range(int(lengths.max())):
            letters = self._bytes[np.minimum(self._starts + position, self._name_ends)]
            changes |= np.diff(letters, prepend=0) != 0
        changes[0] = self.name(0) != last
        return np.flatnonzero(changes)

    def paths(self) -> tuple[bytes, np.ndarray]:
        """All paths, one per line, and where each one starts."""
        edges = np.zeros(len(self._bytes) + 1, np.int8)
        edges[self._path_starts] += 1
        edges[self._path_ends] -= 1
        is_kept = np.cumsum(edges[:-1], dtype=np.int8).view(bool)
        is_kept[self._ends] = True
        lengths = self._path_ends - self._path_starts + 1
        return self._bytes[is_kept].tobytes(), np.cumsum(lengths) - lengths
