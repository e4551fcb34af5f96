"""Registers, spills and shared memory of the GPU kernels, compiled without a GPU.

The kernels are exactly those that a training step of each shipped GPU config launches if its
operators use Triton.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch
from fvcore.common.config import CfgNode

from benchmarks.ahead_of_time import (
    ARCHS,
    SHARED_MEMORY,
    Form,
    Launch,
    Usage,
    forms,
    recorded_launches,
    usage,
)
from benchmarks.tables import markdown_table
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.config import load_config
from slowfast_lara.config.shipped import find_config, shipped_names
from slowfast_lara.errors import ConfigError, InputError
from slowfast_lara.files import write_text
from slowfast_lara.models import MODEL_REGISTRY
from slowfast_lara.progress import print_progress

COLUMNS = ("kernel", "configs", "GPU", "registers", "spills", "shared memory", "constants")


class CompiledKernel(NamedTuple):
    form: Form
    configs: int  # number of shipped configs whose training step launches the form
    arch: int
    usage: Usage

    def fits(self) -> bool:
        return self.usage.spills == 0 and self.usage.shared <= SHARED_MEMORY[self.arch]

    def cells(self) -> list[str]:
        constants = [*self.form.options, *self.form.constants]
        shown = " ".join(f"{key}={value}" for key, value in constants)
        numbers = (str(self.configs), f"sm_{self.arch}", *map(str, self.usage))
        return [self.form.kernel.split(".")[1], *numbers, shown]


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


def configs_with_kernels(names: Sequence[str] = ()) -> dict[str, CfgNode]:
    """The shipped GPU configs that allow VIT.KERNELS triton, reduced to one block each."""
    found = {}
    for name in names or shipped_names():
        with contextlib.suppress(ConfigError):
            cfg = load_config(find_config(name), {"VIT.DEPTH": 1, "VIT.KERNELS": "triton"})
            if cfg.NUM_GPUS:
                found[name] = cfg
    return found


def step_launches(cfg: CfgNode, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The launches of a training step of a config with VIT.KERNELS triton."""
    with torch.device("meta"):
        model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg).to(dtype)
        batch, crop = cfg.TRAIN.BATCH_SIZE // cfg.NUM_GPUS, cfg.DATA.TRAIN_CROP_SIZE
        clip = torch.empty(batch, 3, cfg.DATA.NUM_FRAMES, crop, crop, dtype=dtype)
    return recorded_launches(lambda: model([clip]).sum().backward())


def compiled_kernels(kernels: Sequence[str] = (), archs: Sequence[int] = ()) -> KernelTable:
    """Compile the kernels of all shipped configs in bfloat16; an empty argument selects all."""
    if find_spec("triton") is None:
        raise InputError("compiling the kernels requires the package triton")
    unknown_archs = [arch for arch in archs if arch not in ARCHS]
    if unknown_archs:
        known = ", ".join(map(str, ARCHS))
        raise InputError(f"--archs is {unknown_archs[0]}; must be one of {known}")
    used: Counter[Form] = Counter()
    for cfg in configs_with_kernels().values():
        used.update(forms(step_launches(cfg)))
    names = sorted({form.kernel.split(".")[1] for form in used})
    if unknown := [name for name in kernels if name not in names]:
        raise InputError(f"--kernels is {unknown[0]!r}; must be one of {', '.join(names)}")
    chosen = [
        form
        for form in sorted(used, key=str)
        if form.kernel.split(".")[1] in kernels or not kernels
    ]
    rows = []
    for number, form in enumerate(chosen, start=1):
        for arch in archs or ARCHS:
            rows.append(CompiledKernel(form, used[form], arch, usage(form, arch)))
        print_progress(f"{number} of {len(chosen)}: {form.kernel}")
    unit = "registers per thread; spills and shared memory in bytes"
    return KernelTable(f"triton {version('triton')}: bfloat16, {unit}", rows)
