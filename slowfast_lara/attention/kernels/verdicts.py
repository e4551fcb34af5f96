"""Verdicts on the Triton kernels: measured in a subprocess, saved in the user's cache folder.

A subprocess (measure.py) compares the kernels with PyTorch and times both, because a kernel that
accesses invalid memory makes the GPU unusable for its process. If the subprocess crashes, PyTorch
is used.

A verdict is valid for one invocation of an operator (`Call`), and for one GPU, driver, torch
version, triton version, float32 matmul precision and hash of the code. Each verdict is a JSON file
in ~/.cache/slowfast_lara/kernels (or $XDG_CACHE_HOME/slowfast_lara/kernels). A verdict without a
measured error, e.g. after a crash, is not saved.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import (
    interpreted,
    matmul_precision,
    use_local_triton_cache,
)

logger = logging.getLogger(__name__)

ATTENTION = Path(__file__).parents[1]
# Time limit in seconds for measuring one operator. An operator has up to 22 kernels, and each takes
# a few seconds to compile.
TIMEOUT = 300
MEASURE = "slowfast_lara.attention.kernels.measure"
PREFIX = "verdict "  # prefix of result lines; libraries may print other lines


class Call(NamedTuple):
    """An invocation of an operator: everything that determines its speed.

    `operator` is the name of an estimator or "temporal". `options` are its keyword arguments and
    must be JSON-serialisable. `tensors` are its inputs; only their shapes, strides, alignment and
    dtypes matter. All except the weight and bias of "temporal" have the batch as first dimension.
    """

    operator: str
    options: dict[str, Any]
    tensors: Sequence[Tensor | None]

    @property
    def first(self) -> Tensor:
        assert self.tensors[0] is not None
        return self.tensors[0]

    def key(self) -> tuple[Any, ...]:
        """Operator, options, shapes without the first dimension, and dtype of the first tensor.

        One decision therefore covers batches of any size and any memory layout.
        """
        shapes = tuple(None if x is None else tuple(x.shape[1:]) for x in self.tensors)
        return self.operator, tuple(self.options.items()), shapes, self.first.dtype

    def description(self) -> dict[str, Any]:
        """This invocation as a JSON-serialisable dict."""
        tensors = [
            x
            if x is None
            else {
                "shape": list(x.shape),
                "stride": list(x.stride()),
                # Only the alignment of the first element affects the speed, not the offset itself.
                "offset": x.storage_offset() % 16,
                "dtype": str(x.dtype).removeprefix("torch."),
            }
            for x in self.tensors
        ]
        return {"operator": self.operator, "options": self.options, "tensors": tensors}


class Verdict(NamedTuple):
    """Result of a measurement; a time covers forward and backward pass, and is None if unknown."""

    torch_ms: float | None = None
    triton_ms: float | None = None
    error: float | None = None  # relative error of the kernels against PyTorch in float32
    problem: str = ""  # why the kernels cannot be used; "" if they can

    @property
    def triton(self) -> bool:
        if self.problem or self.triton_ms is None:
            return False
        return self.torch_ms is None or self.triton_ms < self.torch_ms


def of_calls(calls: Sequence[Call], device: torch.device) -> list[Verdict]:
    """Read the verdicts on `calls` from the cache; measure and save missing verdicts."""
    keys = [{**_environment(device), "call": call.description()} for call in calls]
    found = [_read(key) for key in keys]
    missing = [i for i, verdict in enumerate(found) if verdict is None]
    measured = measure([keys[i]["call"] for i in missing], device) if missing else []
    for i, verdict in zip(missing, measured):
        found[i] = verdict
        if verdict.error is not None:
            _write(keys[i], verdict)
    return [verdict for verdict in found if verdict is not None]


def measure(calls: Sequence[dict[str, Any]], device: torch.device) -> list[Verdict]:
    """Measure `calls` in a subprocess; after a crash, a new subprocess measures the next calls."""
    number = len(calls)
    # If logging is not configured, as in a notebook, Python shows only warnings.
    level = logging.INFO if logging.root.handlers else logging.WARNING
    text = "Compiling and measuring kernels (operators: %d) on %s: this may take minutes"
    logger.log(level, text, number, device)
    verdicts: list[Verdict] = []
    while len(verdicts) < number:
        rest = calls[len(verdicts) :]
        done, problem = _measure_in_subprocess(rest, device)
        verdicts += done
        if len(done) < len(rest):
            verdicts.append(Verdict(problem=problem))
    return verdicts


def _measure_in_subprocess(
    calls: Sequence[dict[str, Any]], device: torch.device
) -> tuple[list[Verdict], str]:
    """Return the verdicts, and a description of how the subprocess ended.

    After a crash there are fewer verdicts than `calls`.
    """
    use_local_triton_cache()
    request = {"device": str(device), "precision": matmul_precision(), "calls": calls}
    # Copy sys.path: this process may be a notebook or a test, with its own search path.
    program = f"import sys; sys.path[:] = {sys.path!r}; from {MEASURE} import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    verdicts: list[Verdict] = []
    last_line, timer = "", _kill_later(process)
    with process:
        for line in process.stdout:
            if line.startswith(PREFIX):
                timer.cancel()
                timer = _kill_later(process)
                verdicts.append(Verdict(**json.loads(line.removeprefix(PREFIX))))
                what = calls[len(verdicts) - 1]["operator"]
                logger.info("Measured %s (%d of %d)", what, len(verdicts), len(calls))
            else:
                last_line = line.strip() or last_line
    timed_out = not timer.is_alive()
    timer.cancel()
    if timed_out:
        return verdicts, f"the measurement took more than {TIMEOUT} s"
    return verdicts, f"the measurement ended with code {process.returncode}: {last_line[:200]}"


def _kill_later(process: subprocess.Popen[str]) -> threading.Timer:
    """Start a timer that kills the subprocess after TIMEOUT."""
    timer = threading.Timer(TIMEOUT, process.kill)
    timer.daemon = True  # after an interrupt, Python must not wait for it
    timer.start()
    return timer


def compile_kernels(calls: Sequence[Call], device: torch.device) -> None:
    """Compile the kernels for `calls`, so that other processes find them in Triton's cache."""
    from slowfast_lara.attention.kernels.measure import Operator

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for call in calls:
            Operator(call.description(), device).step("triton")()


def table(calls: Sequence[Call], verdicts: Sequence[Verdict], device: torch.device) -> str:
    """Table of the chosen kernels, one line for each of `calls`."""
    lines = [f"Kernels on {_gpu_name(device)}: milliseconds of a forward and a backward pass"]
    lines.append(
        f"  {'operator':12} {'batch':>5} {'dtype':9} {'used':8} {'PyTorch':>8} {'Triton':>8} faster"
    )
    for call, verdict in zip(calls, verdicts):
        dtype = str(call.first.dtype).removeprefix("torch.")
        times = (verdict.torch_ms, verdict.triton_ms)
        shown = ("-" if ms is None else f"{ms:.3f}" for ms in times)
        ratio = f"{times[0] / times[1]:.2f} x" if times[0] and times[1] else "-"
        used = "Triton" if verdict.triton else "PyTorch"
        cells = "{:>8} {:>8}".format(*shown)
        line = f"  {call.operator:12} {len(call.first):5} {dtype:9} {used:8} {cells} {ratio}"
        lines.append(f"{line}  {verdict.problem}".rstrip())
    return "\n".join(lines)


def _environment(device: torch.device) -> dict[str, Any]:
    """GPU, driver, versions, precision and hash of the code; a verdict is valid only for these."""
    driver = Path("/proc/driver/nvidia/version")
    try:
        triton = version("triton")
    except PackageNotFoundError:  # triton was installed under another package name
        triton = ""
    return {
        "gpu": _gpu_name(device),
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
        "torch": torch.__version__,
        "triton": triton,
        "precision": matmul_precision(),
        "code": _code_hash(),
    }


def _gpu_name(device: torch.device) -> str:
    return "Triton's interpreter" if interpreted() else torch.cuda.get_device_name(device)


@functools.cache
def _code_hash() -> str:
    code = hashlib.sha256()
    for path in sorted(ATTENTION.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "slowfast_lara" / "kernels"


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{digest[:32]}.json"


def _read(key: dict[str, Any]) -> Verdict | None:
    """Read a verdict from the cache; None if the file is missing or invalid."""
    try:
        content = json.loads(_path(key).read_text())
        verdict = Verdict(**content["verdict"])
        numbers = (verdict.torch_ms, verdict.triton_ms, verdict.error)
        valid = content["key"] == key and isinstance(verdict.problem, str)
        valid &= all(x is None or isinstance(x, (int, float)) for x in numbers)
        return verdict if valid else None
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _write(key: dict[str, Any], verdict: Verdict) -> None:
    """Write a verdict atomically: other processes may read it."""
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"key": key, "verdict": verdict._asdict()}, file, indent=1)
        os.replace(file.name, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        logger.warning("Cannot save the choice of kernels: %s", error)
