"""Launches of a training step of ViT-B and bytes saved for its backward pass, without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import slowfast_lara
from benchmarks import fake_cuda
from benchmarks.tables import MarkdownTable
from slowfast_lara.analysis.tables import Cells
from slowfast_lara.errors import InputError, RunError

COLUMNS = ["config", "kernels", "checkout", "launches", "of Triton kernels", "saved, GiB"]
KERNELS = ("torch", "triton")


class StepCount(NamedTuple):
    config: str
    kernels: str
    checkout: str
    launches: int
    triton: int
    saved: int  # bytes

    def cells(self) -> list[str]:
        return [*self[:3], str(self.launches), str(self.triton), f"{self.saved / 2**30:.2f}"]


@dataclass
class StepTable(MarkdownTable):
    counts: list[StepCount]

    def head(self) -> list[str]:
        # Omits the hardware of this machine, which does not affect the counts.
        return [self.title, *self.notes]

    def cells(self) -> Cells:
        return [COLUMNS, *(count.cells() for count in self.counts)]

    def csv_cells(self) -> Cells:
        return [[*COLUMNS[:-1], "saved, bytes"], *self.counts]


def step_counts(configs: Sequence[str], clips: int, before: str | None) -> StepTable:
    if shutil.which("g++") is None:
        raise InputError("counting a step requires g++, to build a fake CUDA device")
    checkouts = {"this": os.path.dirname(slowfast_lara.__path__[0])}
    if before:
        checkouts["before"] = os.path.abspath(before)
    cases = [(config, kernels) for config in configs for kernels in KERNELS]
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "fake_cuda.so")
        fake_cuda.build_library(library)
        found = {
            name: _count(path, library, clips, [":".join(case) for case in cases])
            for name, path in checkouts.items()
        }
    notes = [
        f"{clips} clips, bfloat16 autocast: forward, loss, backward, clipping and optimiser",
        "an operator on a list of tensors (clipping, optimiser) counts as one launch",
        "saved: tensors that autograd keeps for the backward pass, without parameters",
    ]
    counts = [
        StepCount(*case, name, *found[name][number])
        for number, case in enumerate(cases)
        for name in checkouts
    ]
    return StepTable("launches and saved bytes of a training step", counts, notes=notes)


def _count(
    checkout: str, library: str, clips: int, cases: Sequence[str]
) -> list[tuple[int, int, int]]:
    """Launches, Triton launches and saved bytes of each case, with the packages of a checkout."""
    command = [sys.executable, "-W", "ignore", "-P", fake_cuda.__file__, str(clips), *cases]
    environment = {**os.environ, "PYTHONPATH": checkout, "LD_PRELOAD": library}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["the process ended without a message"])[-1]
        raise RunError(f"{checkout}: {reason[:200]}")
    counts = (json.loads(line) for line in done.stdout.splitlines())
    return [(count["launches"], count["triton"], count["saved"]) for count in counts]
