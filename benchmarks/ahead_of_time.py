"""Ahead-of-time compilation of the kernels that a model launches: registers, spills, shared memory.

A model runs on the meta device. Its operators compute the grids and arguments of their kernels, and
a recorder replaces the launches. Triton compiles a kernel separately for each specialisation, here
called *form*: the types of its arguments, which of them are 1 or multiples of 16, and the
compile-time constants. Triton can compile for a GPU that is not present, and ships NVIDIA's
assembler ptxas, which reports the resources of a kernel.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_counts import GpuAttention
from benchmarks.kernel_traffic import OPERATORS
from slowfast_lara.attention.kernels import launch as launching

# Largest shared memory of a program, in bytes, by compute capability without the point.
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
ARCHS = tuple(SHARED_MEMORY)


class Launch(NamedTuple):
    """A launch of the Triton function FILE.FUNCTION; `constants` includes num_warps, num_stages."""

    kernel: str
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Form(NamedTuple):
    """A specialisation of a kernel: all that its compiled code depends on, except the GPU."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]  # constants of the source, and arguments that are 1
    multiples: tuple[str, ...]  # arguments that are multiples of 16
    options: tuple[tuple[str, int], ...]  # warps and stages


class Usage(NamedTuple):
    """Registers per thread, spilled bytes, and bytes of shared memory of a compiled kernel."""

    registers: int
    spills: int
    shared: int


class _OwnOperators(TorchDispatchMode):
    """Runs the code of this package's operators instead of their fake implementations."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function._schema.name
        run = OPDEFS[name]._init_fn if name in OPERATORS else function
        return run(*args, **(kwargs or {}))


class _Recorder:
    """Replacement of a Triton function: records launches instead of running them."""

    def __init__(self, kernel: str, arg_names: list[str], launches: list[Launch]) -> None:
        self.kernel, self.arg_names, self.launches = kernel, arg_names, launches

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *args, **constants: self.launches.append(Launch(self.kernel, args, constants))


def recorded_launches(function: Callable[[], Any]) -> list[Launch]:
    """Run `function` on meta tensors; return the kernel launches that it would make on a GPU."""
    launches: list[Launch] = []
    original = launching.triton_function
    launching.triton_function = lambda kernel: _Recorder(
        kernel, original(kernel).arg_names, launches
    )
    try:
        with GpuAttention(), _OwnOperators():
            function()
    finally:
        launching.triton_function = original
    return launches


def forms(launches: Iterable[Launch], arch: int = 80) -> list[Form]:
    """The distinct forms of `launches`, sorted; `arch` 80 is compute capability 8.0."""
    return sorted({_form(launch, arch) for launch in launches}, key=str)


def _form(launch: Launch, arch: int) -> Form:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    function = launching.triton_function(launch.kernel)
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    given = {**launch.constants, "debug": False, "instrumentation_mode": ""}
    bound, specialization, chosen = bind(*launch.args, **given)
    packed = function._pack_args(backend, given, bound, specialization, chosen)
    _, signature, constants, attributes = packed
    names = function.arg_names
    return Form(
        launch.kernel,
        tuple(signature.items()),
        tuple((names[index], value) for (index,), value in constants.items()),
        tuple(names[index] for (index,), value in attributes.items() if value),
        tuple((key, launch.constants[key]) for key in ("num_warps", "num_stages")),
    )


@functools.cache
def usage(form: Form, arch: int) -> Usage:
    """Resources of a form compiled for a compute capability (80 is sm_80)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = launching.triton_function(form.kernel)
    index = {name: i for i, name in enumerate(function.arg_names)}
    source = ASTSource(
        fn=function,
        signature=dict(form.signature),
        constexprs={(index[name],): value for name, value in form.constants},
        attrs={(index[name],): [["tt.divisibility", 16]] for name in form.multiples},
    )
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options=dict(form.options))
    return Usage(*_assembled(compiled.asm["ptx"], arch), compiled.metadata.shared)


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Assemble PTX code; returns registers per thread and spilled bytes."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = folder / ("ptxas" if arch < 100 else "ptxas-blackwell")
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [assembler, "-v", "--gpu-name", target[1], "-o", f"{source}.o", source]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert registers is not None and spills
    return int(registers[1]), sum(map(int, spills))
