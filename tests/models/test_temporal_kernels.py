"""The temporal stage's Triton kernels: in the interpreter, ahead of time, and their choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slowfast_lara.models import temporal

pytest.importorskip("triton")
from tests.models.ahead_of_time import compiled, launches  # noqa: E402

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that a program may have on an A100; an H100 and a B200 have more.
SHARED = 163 * 1024


@pytest.mark.parametrize("speed", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(speed):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", speed, "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, "tests/models/interpreted_temporal.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout


def assert_fits(arch, dtype, d, frames, project_values):
    kernels = {call[0]: call for call in launches(dtype, d, 768 // d, frames, project_values)}
    assert len(kernels) == 4
    for call in kernels.values():
        result = compiled(call, arch)
        assert result.spilled == 0, result
        assert result.shared <= SHARED, result


def test_compiles_ahead_of_time_without_spills():
    assert_fits(80, torch.bfloat16, 64, 8, False)


@pytest.mark.slow
@pytest.mark.parametrize("project_values", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_everywhere_without_spills(arch, dtype, d, project_values):
    assert_fits(arch, dtype, d, 8, project_values)


def test_choice_of_kernels(monkeypatch):
    q = torch.empty(1, 2, 3, 64)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not temporal.use_triton("auto", q) and not temporal.use_triton("torch", q)
    for kernels, query, message in (
        ("fast", q, "allowed: auto, torch, triton"),
        ("triton", q, "set TRITON_INTERPRET=1"),
        ("triton", q.double(), "float16, bfloat16 and float32"),
        ("triton", torch.empty(1, 2, 3, 129), "heads of at most 128"),
    ):
        with pytest.raises(ValueError, match=message):
            temporal.use_triton(kernels, query)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert temporal.use_triton("triton", q)
    monkeypatch.setattr(temporal, "_HAS_TRITON", False)
    with pytest.raises(ValueError, match="Triton is not installed"):
        temporal.use_triton("triton", q)


@pytest.mark.parametrize("capability, expected", [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_auto_by_capability(monkeypatch, capability, expected):
    class Query:
        dtype, shape, device, is_cuda = torch.float16, (1, 2, 3, 64), "cuda", True

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert temporal.use_triton("auto", Query) is expected
