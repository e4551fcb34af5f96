"""What the GPU kernels take when compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.ahead_of_time import ARCHS, KERNELS, SHARED_MEMORY, VARIANTS, Usage, usage
from slowfast_lara.analysis.result_files import aligned_table, csv_text, markdown_table
from slowfast_lara.errors import InputError
from slowfast_lara.files import write_text

COLUMNS = ("kernel", "GPU", "precision", "d", "C", "registers", "spills", "shared memory")
HEAD_SIZES = (64, 128)
SAMPLES = (64, 128, 256)
HALF = ("bf16", "fp16")


class Row(NamedTuple):
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
        form = [f"{key}={value}" for key, value in self.changes.items()]
        sizes = [str(size) if size else "any" for size in (self.d, self.C)]
        target = (f"sm_{self.arch}", self.dtype)
        return [" ".join((self.kernel, *form)), *target, *sizes, *map(str, self.usage)]


def compiled_kernels(kernels: Sequence[str] = (), archs: Sequence[int] = ()) -> list[Row]:
    """Compile each kernel for each GPU, precision and size that its tile depends on.

    Its other forms, and float32, are compiled for the size of ViT-B and 128 samples alone.
    """
    if find_spec("triton") is None:
        raise InputError("the package triton, which compiles the kernels, is not installed")
    unknown = [name for name in kernels if name not in KERNELS]
    if unknown:
        raise InputError(f"unknown kernel {unknown[0]!r}; known: {', '.join(KERNELS)}")
    return [
        Row(name, arch, dtype, d, C, changes, usage(name, arch, dtype, d=d, C=C, **changes))
        for name in kernels or KERNELS
        for arch in archs or ARCHS
        for dtype, d, C, changes in _forms(name)
    ]


def _forms(kernel: str) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Precisions, sizes and what is fixed in another way."""
    for dtype in HALF:
        for d, C in _sizes(kernel):
            yield dtype, d, C, {}
    d = 0 if kernel.startswith("temporal") else HEAD_SIZES[0]
    C = SAMPLES[1] if _has_samples(kernel) else 0
    yield "fp32", d, C, {}
    for name, changes in VARIANTS:
        if name == kernel:
            yield HALF[0], d, C, changes


def _has_samples(kernel: str) -> bool:
    return kernel.startswith(("key_stats", "query_normaliser", "combine"))


def _sizes(kernel: str) -> Iterator[tuple[int, int]]:
    if kernel.startswith("temporal"):  # its tiles are the same for all
        yield 0, 0
        return
    for d in HEAD_SIZES:
        for C in SAMPLES if _has_samples(kernel) else (0,):
            yield d, C


def as_text(rows: Sequence[Row]) -> str:
    return f"{aligned_table([COLUMNS, *(row.cells() for row in rows)])}\n{verdict(rows)}"


def verdict(rows: Sequence[Row]) -> str:
    bad = sum(not row.fits() for row in rows)
    return f"{len(rows) - bad} of {len(rows)} without spills and within the shared memory"


def write(rows: Sequence[Row], path: str) -> None:
    """path.csv, and path.md for people."""
    made_with = f"triton {version('triton')}; registers of a thread, spills and memory in bytes"
    cells = [row.cells() for row in rows]
    write_text(f"{path}.csv", csv_text([COLUMNS, *cells], [made_with]))
    table = markdown_table([COLUMNS, *cells])
    write_text(f"{path}.md", f"{made_with}. {verdict(rows)}.\n\n{table}\n")
