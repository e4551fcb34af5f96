"""Lists of extracted frames in PySlowFast's form for Something-Something-v2: one line per frame."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from slowfast_lara.data.lists import read_lines
from slowfast_lara.data.string_array import StringArray
from slowfast_lara.errors import DataError
from slowfast_lara.files import check_regular_file

HEADER = "original_vido_id video_id frame_id path labels"


class FrameList(NamedTuple):
    """Videos of a list; for each, the paths of its frames in order, one per line."""

    names: list[str]
    paths: StringArray


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
        names, block, ends = _parse(list_file)
        block.decode()
    except OSError as error:
        raise DataError(f"cannot read the list {list_file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{list_file}: must be UTF-8 text ({error.reason})") from None
    if not names:
        raise DataError(f"{list_file}: empty; expected lines of {HEADER!r}")
    if len(set(names)) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(f"{list_file}: the frames of video {repeated} must be consecutive lines")
    return FrameList(names, StringArray(block, np.array(ends)))


def _parse(list_file: str) -> tuple[list[str], bytearray, list[int]]:
    """Names of the videos, all paths as lines, and where the paths of each video end.

    Such a list has millions of lines: the loop works on bytes and does little per line.
    """
    names: list[str] = []
    block, ends = bytearray(), []
    video: bytes | None = None
    numbers: list[int] = []
    paths: list[bytes] = []

    def finish_video() -> None:
        if any(a >= b for a, b in zip(numbers, numbers[1:])):
            paths[:] = [path for _, path in sorted(zip(numbers, paths))]
        block.extend(b"\n".join(paths) + b"\n")
        ends.append(len(block))

    check_regular_file(list_file)
    with open(list_file, "rb") as file:
        for line in file:  # up to the header, after blank lines
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                break
        for line in file:
            try:
                name, _, frame, rest = line.split(None, 3)
                path, _ = rest.rsplit(None, 1)
                number = int(frame)
            except ValueError:
                if line.strip():
                    raise _wrong_line(list_file, line) from None
                continue
            if name != video:
                if video is not None:
                    finish_video()
                video, numbers, paths = name, [], []
                names.append(name.decode())
            numbers.append(number)
            paths.append(path)
    if video is not None:
        finish_video()
    return names, block, ends


def _wrong_line(list_file: str, line: bytes) -> DataError:
    with open(list_file, "rb") as file:
        number = next(number for number, other in enumerate(file, start=1) if other == line)
    text = line.decode(errors="replace").strip()
    return DataError(f"{list_file}, line {number}: expected {HEADER!r}, got {text!r:.120}")
