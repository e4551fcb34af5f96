"""Files that are whole or absent: written aside, flushed to the disk, renamed; strict JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import Any, TextIO

_ASIDE = ".writing-"


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name to write to; it becomes `path` at the end, or is removed if that fails.

    The name has the suffix of `path`, by which video and picture writers choose a
    format, and nothing else of it: PySlowFast takes any file with "checkpoint" in its
    name for a whole one.
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    aside = os.path.join(folder, f"{_ASIDE}{secrets.token_hex(6)}{os.path.splitext(name)[1]}")
    try:
        yield aside
        if not os.path.islink(aside):  # what it leads to is not ours, and may not be writable
            _sync(aside, os.O_RDWR)
        os.replace(aside, path)
    except OSError as error:
        if error.filename is None:  # a full disk, say
            error.filename = os.fspath(path)
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(aside)
    _sync(folder, os.O_RDONLY)  # so that the new name outlives a power cut


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """A folder to write into; it becomes `path` at the end, or is removed if that fails.

    `path` must not exist: a FileExistsError, before anything is written.
    """
    above = os.path.dirname(os.path.abspath(path))
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
    made = make_folder(above)
    aside = os.path.join(above, f"{_ASIDE}{secrets.token_hex(6)}")
    try:
        try:
            os.mkdir(aside)
        except OSError as error:
            raise OSError(error.errno, error.strerror, above) from None
        yield aside
        for name in os.listdir(aside):
            _sync(os.path.join(aside, name), os.O_RDWR)
        os.rename(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        remove_empty(made)
    _sync(above, os.O_RDONLY)


@contextlib.contextmanager
def atomic_text(path: str | os.PathLike[str], errors: str = "strict") -> Iterator[TextIO]:
    """A text file, written aside and renamed; `errors` as of open: what UTF-8 cannot say."""
    with (
        atomic_write(path) as aside,
        open(aside, "w", encoding="utf-8", newline="", errors=errors) as file,
    ):
        yield file


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with atomic_text(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike[str], content: Any, indent: int | None = 1) -> None:
    write_text(path, json.dumps(content, indent=indent) + "\n")


def check_regular_file(path: str | os.PathLike[str]) -> None:
    """An OSError if a path is no plain file: a FIFO is waited for, a device read, without end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no plain file", path)


def parse_json(text: str, **hooks: Any) -> Any:
    """What JSON says, or a ValueError of one line; `hooks` as of json.loads.

    No NaN, and whole numbers of at most 63 bits: longer ones neither print nor fit in a tensor.
    """
    hooks = {"parse_int": _whole_number, "parse_constant": _refuse_constant, **hooks}
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _whole_number(digits: str) -> int:
    if len(digits) > 20 or int(digits).bit_length() > 63:
        raise ValueError(f"{digits[:24]}... is a whole number of more than 63 bits")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def make_folder(folder: str | os.PathLike[str]) -> list[str]:
    """Make a folder; what had to be made for it, the deepest first."""
    made, above = [], os.path.abspath(folder)
    while not os.path.exists(above):
        made.append(above)
        above = os.path.dirname(above)
    os.makedirs(folder, exist_ok=True)
    return made


def remove_empty(folders: list[str]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # something is in it
            os.rmdir(folder)


def remove_unfinished(folder: str) -> None:
    """Remove what a killed process was writing into a folder."""
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if name.startswith(_ASIDE):
            path = os.path.join(folder, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def _sync(path: str, access: int) -> None:
    """Flush a file or a folder to the disk. Windows flushes only what is open for writing."""
    # Windows opens no folder, and some network file systems sync none.
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, access)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
