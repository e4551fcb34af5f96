"""Registers, spills and shared memory of the GPU kernels, compiled without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.ahead_of_time import (
    ARCHS,
    GROUP_KERNELS,
    KERNELS,
    SHARED_MEMORY,
    VARIANTS,
    Usage,
    usage,
)
from benchmarks.tables import markdown_table
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.attention.kernels.merged import MAX_GROUPS
from slowfast_lara.errors import InputError
from slowfast_lara.files import write_text

COLUMNS = ("kernel", "GPU", "precision", "d", "C", "registers", "spills", "shared memory")
HEAD_SIZES = (64, 128)
SAMPLES = (64, 128, 256)
HALF = ("bf16", "fp16")


class CompiledKernel(NamedTuple):
    kernel: str
    arch: int
    dtype: str
    d: int
    C: int
    changes: dict[str, Any]
    usage: Usage

    def fits(self) -> bool:
        return self.usage.spills == 0 and self.usage.shared <= SHARED_MEMORY

    def cells(self) -> list[str]:
        changes = [f"{key}={value}" for key, value in self.changes.items()]
        sizes = [str(size) if size else "any" for size in (self.d, self.C)]
        target = (f"sm_{self.arch}", self.dtype)
        return [" ".join((self.kernel, *changes)), *target, *sizes, *map(str, self.usage)]


@dataclass
class KernelTable(ResultTable):
    kernels: list[CompiledKernel]

    def head(self) -> list[str]:
        # Omits the hardware of this machine, which does not affect compiled kernels.
        return [self.title, *self.notes]

    def cells(self) -> Cells:
        return [COLUMNS, *(kernel.cells() for kernel in self.kernels)]

    def footer(self) -> list[str]:
        fitting = sum(kernel.fits() for kernel in self.kernels)
        return [f"{fitting} of {len(self.kernels)} do not spill and fit into shared memory"]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the table as PATH.csv and PATH.md."""
        super().write(path)
        lines = "\n\n".join([self.title, *self.footer(), markdown_table(self.cells())])
        write_text(f"{path}.md", lines + "\n")


def compiled_kernels(kernels: Sequence[str] = (), archs: Sequence[int] = ()) -> KernelTable:
    """Compile kernels for architectures; an empty argument selects all.

    bfloat16 and float16 are compiled for all HEAD_SIZES and SAMPLES. float32 and the VARIANTS are
    compiled only for ViT-B's head size and 128 samples.
    """
    if find_spec("triton") is None:
        raise InputError("compiling the kernels requires the package triton")
    unknown = [name for name in kernels if name not in KERNELS]
    if unknown:
        raise InputError(f"--kernels is {unknown[0]!r}; must be one of {', '.join(KERNELS)}")
    unknown_archs = [arch for arch in archs if arch not in ARCHS]
    if unknown_archs:
        known = ", ".join(map(str, ARCHS))
        raise InputError(f"--archs is {unknown_archs[0]}; must be one of {known}")
    rows = [
        CompiledKernel(
            name, arch, dtype, d, C, changes, usage(name, arch, dtype, d=d, C=C, **changes)
        )
        for name in kernels or KERNELS
        for arch in archs or ARCHS
        for dtype, d, C, changes in _variants(name)
    ]
    unit = "registers per thread; spills and shared memory in bytes"
    return KernelTable(f"triton {version('triton')}: {unit}", rows)


def _variants(kernel: str) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Yield dtype, d, C and changed constants; 0 for d or C if the kernel does not depend on it."""
    for dtype in HALF:
        for d, C in _sizes(kernel):
            yield dtype, d, C, {}
    d = 0 if kernel.startswith("temporal") else HEAD_SIZES[0]
    C = SAMPLES[1] if _has_samples(kernel) else 0
    if kernel not in GROUP_KERNELS:
        yield "fp32", d, C, {}
    for name, changes in VARIANTS:
        if name == kernel:
            yield HALF[0], d, C, changes


def _has_samples(kernel: str) -> bool:
    with_samples = kernel.startswith(("key_stats", "query_normaliser", "combine"))
    return with_samples or kernel in GROUP_KERNELS[1:]


def _sizes(kernel: str) -> Iterator[tuple[int, int]]:
    if kernel.startswith("temporal"):  # the tile does not depend on the sizes
        yield 0, 0
        return
    for d in HEAD_SIZES:
        for C in SAMPLES if _has_samples(kernel) else (0,):
            if kernel not in GROUP_KERNELS or C <= MAX_GROUPS:
                yield d, C
