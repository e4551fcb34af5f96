"""Lists of extracted frames in PySlowFast's format, one line per frame."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from slowfast_lara.data.lists import read_lines
from slowfast_lara.data.string_array import StringArray
from slowfast_lara.data.text_files import open_text
from slowfast_lara.errors import DataError

HEADER = "original_vido_id video_id frame_id path labels"


class FrameList(NamedTuple):
    """Names of the videos of a list, and the paths and labels of their frames.

    `paths` and `labels` have one string per video, with one line per frame. `labels` is empty
    unless the list was read with labels.
    """

    names: list[str]
    paths: StringArray
    labels: StringArray


def has_header(list_file: str) -> bool:
    return next(read_lines(list_file), (1, ""))[1].startswith(HEADER.split()[0])


def read_frame_list(list_file: str, *, with_labels: bool = False) -> FrameList:
    """Read a list and sort the frames of each video by `frame_id`.

    Raises a DataError for invalid lines, and if the lines of a video are not consecutive.
    """
    if not has_header(list_file):
        raise DataError(
            f"{list_file}, line 1: expected the header {HEADER!r}; remove this file if "
            "the videos are DATA.PATH_PREFIX/ID.webm, not extracted frames"
        )
    names, *columns = _parse(list_file, with_labels)
    if not names:
        raise DataError(f"{list_file}: no frames below the header {HEADER!r}")
    if len(set(names)) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"{list_file}: the frames of video {repeated} must be consecutive lines")
    return FrameList(names, *(StringArray(block, np.array(ends)) for block, ends in columns))


# The lines of all videos, and each video's end offset.
_Column = tuple[bytearray, list[int]]


def _parse(list_file: str, with_labels: bool) -> tuple[list[str], _Column, _Column]:
    """The names of the videos, the frame paths and the frame labels.

    The loop works on bytes and does little per line, because lists have millions of lines.
    """
    names: list[str] = []
    columns: list[_Column] = [(bytearray(), []), (bytearray(), [])]
    video: bytes | None = None
    numbers: list[int] = []
    paths: list[bytes] = []
    labels: list[bytes] = []

    def finish_video() -> None:
        if any(a >= b for a, b in zip(numbers, numbers[1:])):
            order = sorted(range(len(numbers)), key=lambda i: (numbers[i], paths[i]))
            paths[:] = [paths[i] for i in order]
            labels[:] = [labels[i] for i in order] if with_labels else []
        for (block, ends), lines in zip(columns, (paths, labels) if with_labels else (paths,)):
            block.extend(b"\n".join(lines) + b"\n")
            ends.append(len(block))

    with open_text(list_file, mode="rb", encoding=None) as file:
        lines = enumerate(file, start=1)
        for _, line in lines:  # skip the header and blank lines before it
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                break
        for line_number, line in lines:
            try:
                name, _, frame, rest = line.split(None, 3)
                path, label = rest.rsplit(None, 1)
                number = int(frame)
            except ValueError:
                if not (text := line.decode(errors="replace").strip()):
                    continue
                where = f"{list_file}, line {line_number}"
                raise DataError(f"{where}: expected {HEADER!r}, got {text!r:.120}") from None
            if name != video:
                if video is not None:
                    finish_video()
                video, numbers, paths, labels = name, [], [], []
                names.append(name.decode())
            numbers.append(number)
            paths.append(path)
            if with_labels:
                labels.append(label)
        if video is not None:
            finish_video()
        for block, _ in columns:
            block.decode()  # raises UnicodeDecodeError if a path is not UTF-8
    return names, columns[0], columns[1]
