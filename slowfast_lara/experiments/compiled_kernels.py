"""What the GPU kernels take when compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

from slowfast_lara.attention.kernels.ahead_of_time import KERNELS, SHARED_MEMORY, Usage, usage
from slowfast_lara.errors import InputError
from slowfast_lara.experiments.result_files import aligned_table, csv_text, markdown_table
from slowfast_lara.files import write_text

COLUMNS = ("kernel", "GPU", "precision", "d", "C", "registers", "spills", "shared memory")
HEAD_SIZES = (64, 128)
SAMPLES = (64, 128, 256)
PRECISIONS = ("bf16", "fp16")


class Row(NamedTuple):
    kernel: str
    arch: int
    dtype: str
    d: int
    C: int
    usage: Usage

    def fits(self) -> bool:
        return self.usage.spills == 0 and self.usage.shared <= SHARED_MEMORY[self.arch]

    def cells(self) -> list[str]:
        sizes = [str(size) if size else "any" for size in (self.d, self.C)]
        return [self.kernel, f"sm_{self.arch}", self.dtype, *sizes, *map(str, self.usage)]


def compiled_kernels(kernels: Sequence[str] = (), archs: Sequence[int] = ()) -> list[Row]:
    """Compile each kernel for each GPU, precision and size that its tile depends on."""
    if find_spec("triton") is None:
        raise InputError("the package triton, which compiles the kernels, is not installed")
    unknown = [name for name in kernels if name not in KERNELS]
    if unknown:
        raise InputError(f"unknown kernel {unknown[0]!r}; known: {', '.join(KERNELS)}")
    return [
        Row(name, arch, dtype, d, C, usage(name, arch, dtype, d=d, C=C))
        for name in kernels or KERNELS
        for arch in archs or SHARED_MEMORY
        for dtype in PRECISIONS
        for d, C in _sizes(name)
    ]


def _sizes(kernel: str) -> Iterator[tuple[int, int]]:
    if kernel.startswith("temporal"):  # its tiles are the same for all
        yield 0, 0
        return
    own_samples = kernel.startswith(("seen", "column", "mix"))
    for d in HEAD_SIZES:
        for C in SAMPLES if own_samples else (0,):
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
