"""Atomic writes of files and folders (temporary name, fsync, rename), and strict JSON."""

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

_TEMPORARY = ".writing-"


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path to write to; rename the file to `path` on success, else remove it.

    The temporary name keeps only the suffix of `path`, by which writers choose a format. It omits
    the rest, because PySlowFast loads any file with "checkpoint" in its name.
    """
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    temporary = _temporary_name(folder, os.path.splitext(name)[1])
    try:
        yield temporary
        if not os.path.islink(temporary):  # a link needs no fsync; its target may be read-only
            _sync(temporary, os.O_RDWR)
        os.replace(temporary, path)
    except OSError as error:
        if error.filename in (None, temporary):  # None if the disk is full
            error.filename, error.filename2 = os.fspath(path), None
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
    _sync(folder, os.O_RDONLY)  # makes the rename durable


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary folder to fill; rename it to `path` on success, else remove it.

    Raise FileExistsError before anything is written if `path` exists.
    """
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
    created = make_folder(parent)
    temporary = _temporary_name(parent)
    try:
        try:
            os.mkdir(temporary)
        except OSError as error:
            raise OSError(error.errno, error.strerror, parent) from None
        yield temporary
        for name in os.listdir(temporary):
            _sync(os.path.join(temporary, name), os.O_RDWR)
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        remove_empty(created)
    _sync(parent, os.O_RDONLY)


@contextlib.contextmanager
def atomic_text(path: str | os.PathLike[str], errors: str = "strict") -> Iterator[TextIO]:
    """Open a UTF-8 text file for an atomic write; `errors` as in `open`."""
    with (
        atomic_write(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="", errors=errors) as file,
    ):
        yield file


def open_in_place(path: str, flags: int) -> int:
    """Open a file to write in place, not atomically; usable as `opener` of the builtin `open`.

    Raise OSError for a symbolic link, a file with several hard links, a FIFO or a device. The file
    names are predictable, so another user may have placed a link there to redirect the write.
    """
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "is a symbolic link; remove it", path)
    # With O_NONBLOCK, opening a FIFO without a reader does not block. Windows lacks O_NOFOLLOW and
    # O_NONBLOCK.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags & ~os.O_TRUNC, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        if flags & os.O_TRUNC:
            os.truncate(descriptor, 0)
        return descriptor
    os.close(descriptor)
    problem = "has several hard links" if stat.S_ISREG(status.st_mode) else "not a regular file"
    raise OSError(errno.EINVAL, f"{problem}; remove it", path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with atomic_text(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike[str], content: Any, indent: int | None = 1) -> None:
    write_text(path, json.dumps(content, indent=indent) + "\n")


def csv_cell(value: object) -> object:
    """Prefix text with an apostrophe if a spreadsheet would evaluate it as a formula.

    Other values are returned unchanged. In some locales, full-width signs also start a formula.
    """
    if not isinstance(value, str):
        return value
    is_formula = value[:1] in ("\t", "\r", "\n") or value.lstrip()[:1] in (*"=+-@＝＋－＠",)
    return f"'{value}" if is_formula else value


def check_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the path is a regular file: reading a FIFO or device may never end."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def parse_json(text: str, **hooks: Any) -> Any:
    """Parse JSON; raise a one-line ValueError for NaN, infinities and integers beyond 63 bits.

    `hooks` are arguments of `json.loads`; they may replace these checks. Integers beyond 63 bits do
    not fit into a tensor, and Python refuses to print integers of more than 4,300 digits.
    """
    hooks = {"parse_int": _parse_int, "parse_constant": _reject_constant, **hooks}
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or int(digits).bit_length() > 63:
        raise ValueError(f"an integer that starts with {digits[:24]} has more than 63 bits")
    return int(digits)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def make_folder(folder: str | os.PathLike[str]) -> list[str]:
    """Create a folder and its parents; return the folders that were created, deepest first."""
    created, parent = [], os.path.abspath(folder)
    while not os.path.exists(parent):
        created.append(parent)
        parent = os.path.dirname(parent)
    os.makedirs(folder, exist_ok=True)
    return created


def remove_empty(folders: list[str]) -> None:
    """Remove the given folders if they are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def remove_unfinished(folder: str) -> None:
    """Remove temporary files and folders that killed processes left in a folder."""
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if name.startswith(_TEMPORARY):
            path = os.path.join(folder, name)
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            shutil.rmtree(path) if is_folder else os.remove(path)


def _temporary_name(folder: str, suffix: str = "") -> str:
    return os.path.join(folder, f"{_TEMPORARY}{secrets.token_hex(6)}{suffix}")


def _sync(path: str, access: int) -> None:
    """fsync a file or folder; `access` is O_RDWR for files (Windows requires it), else O_RDONLY."""
    # Windows cannot open folders; some network file systems cannot sync folders.
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(path, access)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
