"""The demo server of a small model, in a process of its own."""

from __future__ import annotations

import pytest

from tests.helpers.runs import free_port, start


@pytest.fixture()
def served(model, names, tmp_path, monkeypatch):
    """The address of the page, and its process, with a temporary folder of ours."""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    # By default PyTorch creates this folder below TMPDIR.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    port = free_port()
    flags = (*model.flags(), "--classes", names, "--port", port, "--megabytes", 1, "--minutes", 1)
    flags += ("--allow-host", "Proxy.example", "other.example")
    process = start("demo", *flags, program=("-m", "slowfast_lara.cli"), folder=tmp_path)
    line = process.stdout.readline()
    address = f"http://127.0.0.1:{port}/"
    assert address in line, process.stderr.read()
    return address, process
