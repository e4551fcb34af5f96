"""Fallbacks for Windows, each as a unit: file syncs, locks, signals, output."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import io
import os
import signal
import sys
from types import ModuleType

import pytest

from slowfast_lara import locks
from slowfast_lara.errors import InputError, run_with_exit_code
from slowfast_lara.files import atomic_folder, write_text


def test_writes_without_sync_of_folders(tmp_path, monkeypatch):
    """Windows cannot open folders, and syncs only files that are open for writing."""
    real_open, real_sync, synced = os.open, os.fsync, []

    def open_file(path, flags, *rest, **more):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_open(path, flags, *rest, **more)

    def sync(file):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        synced.append(file)
        real_sync(file)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "fsync", sync)
    write_text(tmp_path / "a.txt", "text")
    with atomic_folder(tmp_path / "folder") as temporary:
        write_text(os.path.join(temporary, "b.txt"), "text")
    assert (tmp_path / "a.txt").read_text() == (tmp_path / "folder/b.txt").read_text() == "text"
    assert len(synced) == 3 and sorted(os.listdir(tmp_path)) == ["a.txt", "folder"]


@pytest.fixture
def msvcrt(monkeypatch):
    """A stand-in for Windows' locks, on which the package falls back without fcntl."""
    module = ModuleType("msvcrt")
    module.LK_NBLCK = 2

    def locking(file: int, mode: int, count: int) -> None:
        assert (mode, count, os.lseek(file, 0, os.SEEK_CUR) > 1000) == (2, 1, True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # excludes this process too
        except OSError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    module.locking = locking
    monkeypatch.setitem(sys.modules, "msvcrt", module)
    monkeypatch.setattr(locks, "fcntl", None)


def test_lock(tmp_path, msvcrt):
    folder = str(tmp_path / "run")
    with locks.exclusive_lock(folder, "OUTPUT_DIR"):
        second = pytest.raises(InputError, match=f"another run: process {os.getpid()}")
        with second, locks.exclusive_lock(folder, "OUTPUT_DIR"):
            pass
    assert not os.path.exists(folder)
    with locks.exclusive_lock(folder, "OUTPUT_DIR"):
        assert os.listdir(folder) == [locks.LOCK]


def test_open_lock_file_cannot_be_removed(tmp_path, msvcrt, monkeypatch):
    real_remove = os.remove

    def remove(path):
        names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        if any(os.path.exists(name) and os.path.samefile(name, path) for name in names):
            raise PermissionError(errno.EACCES, "file is open", path)
        real_remove(path)

    monkeypatch.setattr(os, "remove", remove)
    with locks.exclusive_lock(str(tmp_path / "run"), "OUTPUT_DIR"):
        pass
    assert os.listdir(tmp_path) == []


def test_signals_without_sigusr1(monkeypatch):
    """A second copy of the module is imported, without the signals and timers of POSIX."""
    for name in ("SIGUSR1", "SIGALRM", "setitimer"):
        monkeypatch.delattr(signal, name)
    spec = importlib.util.find_spec("slowfast_lara.engine.signals")
    signals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(signals)
    assert signals.SIGNALS == (signal.SIGTERM, signal.SIGINT)


def test_output_in_a_legacy_code_page(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="cp1252"))
    assert run_with_exit_code(lambda: print("größer 左", flush=True)) == 0
    assert output.getvalue().decode("cp1252").split() == ["größer", "\\u5de6"]
