"""Exclusive locks of folders, and the files that they leave."""

from __future__ import annotations

import fcntl
import os

import pytest

from slowfast_lara.errors import ConfigError
from slowfast_lara.locks import LOCK, exclusive_lock


def test_empty_folders_are_removed(tmp_path):
    with exclusive_lock(str(tmp_path / "a" / "b"), "OUTPUT_DIR", ConfigError):
        assert (tmp_path / "a" / "b" / LOCK).read_text().startswith("process ")
    assert os.listdir(tmp_path) == []
    with exclusive_lock(str(tmp_path / "a" / "b"), "OUTPUT_DIR", ConfigError):
        (tmp_path / "a" / "b" / "log").touch()
    assert os.listdir(tmp_path / "a" / "b") == ["log"]


def test_lock_file_removed_by_its_previous_holder(tmp_path, monkeypatch):
    """The holder removes the file when it ends, possibly after another process has opened it."""
    real, removed = fcntl.lockf, []

    def lockf(file, flags):
        if not removed:
            removed.append(os.remove(tmp_path / LOCK))
        real(file, flags)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with exclusive_lock(str(tmp_path), "OUTPUT_DIR", ConfigError):
        assert removed and (tmp_path / LOCK).exists()


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    context = exclusive_lock(str(tmp_path / "file" / "out"), "OUTPUT_DIR", ConfigError)
    with pytest.raises(ConfigError, match="OUTPUT_DIR is .* writable folder"):
        context.__enter__()


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_lock_file_that_is_a_link(tmp_path, link):
    target = tmp_path / "thesis.tex"
    target.write_text("precious")
    getattr(tmp_path / LOCK, link)(target)
    context = exclusive_lock(str(tmp_path), "OUTPUT_DIR", ConfigError)
    with pytest.raises(ConfigError, match=r"OUTPUT_DIR is .*\.lock .*link"):
        context.__enter__()
    assert target.read_text() == "precious" and (tmp_path / LOCK).exists()
