"""`slowfast-lara benchmark gpu`: check and time kernels, attentions and training steps.

Measurements run in a worker process (gpu_jobs.py). Each result, or the reason of a failure, is
immediately appended to a CSV file. A repeated command runs only the missing measurements.
"""

from __future__ import annotations

import csv
import datetime
import getpass
import itertools
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

import torch

from slowfast_lara.analysis.gpu_jobs import (
    PARTS,
    PATHS,
    Case,
    Cost,
    Settings,
    check_kernels,
    has_path,
    machine,
    measure,
)
from slowfast_lara.analysis.tables import aligned_table, csv_text
from slowfast_lara.analysis.worker import JobFailed, Worker
from slowfast_lara.attention import ESTIMATORS, has_kernels
from slowfast_lara.errors import InputError, printable
from slowfast_lara.files import check_regular_file, open_in_place
from slowfast_lara.models.attention_config import RECOMMENDED, display_name, resolve_attention
from slowfast_lara.progress import print_progress

CHECK, ALL_OPERATORS = "check", "all operators"
LIMIT = 600.0  # seconds per measurement
HOST_BOUND = 0.8  # Python limits the speed if host time / total time is above this


class Row(NamedTuple):
    """A line of the result file: a timing, or the check of an operator against float64."""

    part: str
    crop: int
    frames: int
    precision: str
    attention: str  # the operator, if the row is a check
    path: str
    ms: float | None = None
    host_ms: float | None = None
    mib: float | None = None
    error: float | None = None  # relative error against float64
    problem: str = ""

    @property
    def case(self) -> Case:
        return Case(*self[:6])

    @property
    def size(self) -> str:
        return f"{self.crop}x{self.frames}"

    def __str__(self) -> str:
        if self.part == CHECK:
            words = [self.part, self.precision, self.attention]
            result = "" if self.error is None else f"relative error {self.error:.1e}"
        else:
            words = [self.part, self.size, self.precision, self.attention, self.path]
            result = f"{self.ms:.3f} ms, host {self.host_ms:.3f} ms" if self.ms else ""
        return f"{' '.join(filter(None, words))}: {', '.join(filter(None, (result, self.problem)))}"


class Plan(NamedTuple):
    """Sizes, precisions, attentions and paths to measure.

    All crops are measured at the first number of frames and the first precision. The other numbers
    of frames and the other precisions are measured at the first crop only.
    """

    crops: Sequence[int]
    frames: Sequence[int]
    precisions: Sequence[str]
    # None: all attentions; for steps and inference, only exact attention and those with kernels
    attentions: Sequence[str] | None = None
    paths: Sequence[str] = tuple(PATHS)

    def cases(self) -> list[Case]:
        """All cases; those with torch.compile come last, because compilation is slow."""
        sizes = [(crop, self.frames[0]) for crop in self.crops]
        sizes += [(self.crops[0], number) for number in self.frames[1:]]
        points = [(*size, self.precisions[0]) for size in sizes]
        points += [(*sizes[0], precision) for precision in self.precisions[1:]]
        cases = [
            Case(part, *point, name, path)
            for point, part in itertools.product(points, PARTS)
            for name in self.names(part)
            for path in self.paths
            if has_path(part, name, path)
        ]
        return sorted(cases, key=lambda case: PATHS[case.path][1])

    def names(self, part: str) -> list[str]:
        """Names of the attentions to measure for `part`; "temporal" does not depend on them."""
        if part == "temporal":
            return [""]
        if self.attentions is not None:
            return [display_name(name) for name in self.attentions]
        names = [display_name(name) for name in ESTIMATORS] + [*RECOMMENDED]
        if part == "attention":
            return names
        return [n for n in names if n == "exact" or has_kernels(resolve_attention(n)[0])]


def benchmark_gpu(plan: Plan, settings: Settings, minutes: float, out: str) -> None:
    """Run the measurements missing in the file `out`.csv; print all results and a verdict."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "PyTorch finds no GPU on this machine; in a checkout, `python -m benchmarks roofline` "
            "estimates the times of a GPU, and `python -m benchmarks crop` measures this CPU"
        )
    for name in plan.attentions or ():
        resolve_attention(name)
    end, path = time.monotonic() + 60 * minutes, f"{out}.csv"
    with Worker() as worker:
        try:
            found = worker.call(machine, settings.device, limit=LIMIT)
        except JobFailed as problem:
            raise InputError(f"cannot use device {settings.device!r}: {problem}") from None
        obstacle = found.pop("kernels")
        with ResultFile(path, found, settings) as file:
            if obstacle:
                print_progress(f"Triton kernels are not measured: {obstacle}")
                plan = plan._replace(paths=[p for p in plan.paths if PATHS[p][0] == "torch"])
            else:
                for precision in plan.precisions:
                    _check(worker, file, settings.device, precision)
            missing = _measure_all(worker, file, plan.cases(), settings, end)
    print(aligned_table(_table(file.rows)))
    print("\n".join(verdict(file.rows, plan, settings.clips, obstacle)))
    if missing:
        print(f"{missing} measurements are left: repeat the command to resume")
    print(
        f"Please send {printable(path)}: attach it to an issue of the project (template: GPU "
        "benchmark). It names CPU, GPU, driver and versions, but no user, host or path."
    )


def _check(worker: Worker, file: ResultFile, device: str, precision: str) -> None:
    def row(operator: str, error: float | None, problem: str) -> Row:
        return Row(CHECK, 0, 0, precision, operator, "triton", error=error, problem=problem)

    if file.has(row(ALL_OPERATORS, None, "").case):
        return
    print_progress(f"comparing the kernels in {precision} with PyTorch in float64")
    try:
        checks = worker.call(check_kernels, device, precision, limit=2 * LIMIT)
    except JobFailed as problem:
        file.add([row(ALL_OPERATORS, None, str(problem))])
        return
    failed = sum(bool(c.problem) for c in checks)
    largest = max((c.error for c in checks if c.error is not None), default=None)
    summary = f"{failed} of {len(checks)} operators failed" if failed else ""
    # The summary row is written last: without this row, a repeated command repeats the check.
    file.add([*(row(*check) for check in checks), row(ALL_OPERATORS, largest, summary)])


def _measure_all(
    worker: Worker, file: ResultFile, cases: Sequence[Case], settings: Settings, end: float
) -> int:
    """Measure the cases missing in the file; return how many are still missing.

    No measurement starts after the time `end`.
    """
    todo = [case for case in cases if not file.has(case)]
    started = time.monotonic()
    shown = f"{(end - started) / 60:.0f} min"
    print_progress(f"{len(todo)} of {len(cases)} measurements to do; none starts after {shown}")
    for number, case in enumerate(todo):
        if time.monotonic() > end:
            return len(todo) - number
        try:
            cost = worker.call(measure, case, settings, limit=LIMIT)
            row = Row(*case, *cost) if isinstance(cost, Cost) else Row(*case, problem=cost)
        except JobFailed as problem:
            row = Row(*case, problem=str(problem))
        file.add([row])
        used = f"{(time.monotonic() - started) / 60:.1f} of {shown}"
        print_progress(f"[{number + 1}/{len(todo)}, {used}] {file.rows[-1]}")
    return 0


class ResultFile:
    """A CSV file with one line per measurement; its head has hardware, versions and settings."""

    def __init__(self, path: str, found: dict[str, str], settings: Settings) -> None:
        machine = ", ".join(f"{key} {value}" for key, value in found.items())
        same = ", ".join(f"{key} {value}" for key, value in settings._asdict().items())
        self.path = path
        self.rows: list[Row] = []
        self._file: TextIO | None = None
        self._head = ["slowfast-lara benchmark gpu", f"machine: {machine}", f"settings: {same}"]

    def __enter__(self) -> ResultFile:
        end = self._resume() if os.path.lexists(self.path) else 0
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8", newline="", opener=open_in_place)
        self._file.truncate(end)
        if not end:
            date = f"started {datetime.date.today().isoformat()}"
            self._write(csv_text([Row._fields], [*self._head, date]))
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def has(self, case: Case) -> bool:
        return any(row.case == case for row in self.rows)

    def add(self, rows: Iterable[Row]) -> None:
        rows = [row._replace(problem=anonymous(row.problem)) for row in rows]
        self.rows += rows
        self._write(csv_text([[*map(_cell, row)] for row in rows]))

    def _write(self, text: str) -> None:
        assert self._file is not None
        self._file.write(text)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _resume(self) -> int:
        """Read the rows of an existing file; returns its size in bytes up to the last full line.

        Returns 0 if the file has no line of column names.
        """
        check_regular_file(self.path)
        with open(self.path, "rb") as file:
            content = file.read()
        end = content.rfind(b"\n") + 1  # a killed process may leave part of a line
        lines = content[:end].decode("utf-8", errors="replace").splitlines()
        if not lines:
            return 0
        expected = [f"# {line}" for line in self._head]
        for old, new in zip(lines, expected):
            if old != new:
                raise InputError(
                    f"{self.path}: {_difference(old, new)}; choose another --out or move the file"
                )
        body = list(itertools.dropwhile(lambda line: line.startswith("#"), lines))
        self.rows = [self._row(number, line) for number, line in enumerate(body[1:], start=1)]
        # No column names: a process was killed while it wrote the head. The file is then rewritten.
        return end if body else 0

    def _row(self, number: int, line: str) -> Row:
        try:
            part, crop, frames, *names, ms, host, mib, error, problem = next(csv.reader([line]))
            precision, attention, path = names
            case = Case(part, int(crop), int(frames), precision, attention, path)
            return Row(*case, _number(ms), _number(host), _number(mib), _number(error), problem)
        except (ValueError, StopIteration, csv.Error):
            raise InputError(f"{self.path}: row {number} is invalid: {line[:100]!r}") from None


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _difference(old: str, new: str) -> str:
    """Describe the first entry in which two header lines differ."""
    pairs = itertools.zip_longest(old.split(", "), new.split(", "), fillvalue="nothing")
    then, now = next((a, b) for a, b in pairs if a != b)
    return f"measured with {then.removeprefix('# ')!r}, but this is {now.removeprefix('# ')!r}"


def anonymous(text: str) -> str:
    """Replace paths by PATH, and the names of machine and user by NAME."""
    text = re.sub(r"(?<!\w)(?:[A-Za-z]:)?(?:~|\.{1,2})?[\\/][^\s'\"<>|,;:()]+", "PATH", text)
    for name in {socket.gethostname(), socket.gethostname().split(".")[0], _user()} - {""}:
        text = re.sub(rf"\b{re.escape(name)}\b", "NAME", text)
    return printable(text)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # in a container, the user may have no name
        return ""


def _table(rows: Sequence[Row]) -> list[list[object]]:
    """A line for each part, size, precision and attention, with a column for each path."""
    head = ["part", "size", "precision", "attention"]
    hosts = ("torch", "triton")
    table: list[list[object]] = [[*head, *PATHS, *(f"{path} host" for path in hosts), "problems"]]
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row.part != CHECK:
            group = (row.part, row.size, row.precision, row.attention or "-")
            groups.setdefault(group, {})[row.path] = row
    for key, found in groups.items():
        times = [_shown(found[path].ms if path in found else None) for path in PATHS]
        times += [_shown(found[path].host_ms if path in found else None) for path in hosts]
        problems = (f"{path}: {row.problem}" for path, row in found.items() if row.problem)
        table.append([*key, *times, "; ".join(problems)[:80]])
    return table


def _shown(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}"


def verdict(rows: Sequence[Row], plan: Plan, clips: int, obstacle: str) -> list[str]:
    """Lines on the kernels' agreement with float64, the fastest attentions and fastest steps."""
    checks = [row for row in rows if row.part == CHECK and row.attention == ALL_OPERATORS]
    failed = [f"{row.precision}: {row.problem}" for row in checks if row.problem]
    largest = max((row.error or 0.0 for row in checks), default=0.0)
    agree = f"agree with float64, largest relative error {largest:.1e}"
    kernels = obstacle or "; ".join(failed) or (agree if checks else "not checked")
    precision = plan.precisions[0]
    return [
        f"kernels: {kernels}",
        f"fastest attention in {precision}: {'; '.join(_fastest(rows, 'attention', precision))}",
        f"fastest training step in {precision}: "
        + "; ".join(_fastest(rows, "step", precision, clips)),
    ]


def _fastest(
    rows: Sequence[Row], part: str, precision: str, clips: int | None = None
) -> Iterator[str]:
    """For each size, the fastest attention and path, compared with the fastest exact attention."""
    timed = [r for r in rows if r.part == part and r.precision == precision and r.ms is not None]
    sizes = dict.fromkeys(row.size for row in timed)
    if not sizes:
        yield "not measured"
    for size in sizes:
        here = [row for row in timed if row.size == size]
        best = min(here, key=lambda row: row.ms or 0.0)
        exact = min((row.ms or 0.0 for row in here if row.attention == "exact"), default=None)
        words = f"{size} {best.attention} ({best.path})"
        if best.ms and clips is not None:
            words += f" {clips / best.ms * 1e3:.1f} clips/s"
        if best.ms and exact is not None and best.attention != "exact":
            words += f" in {best.ms / exact:.2f} of the time of exact"
        on_gpu = best.mib is not None
        if on_gpu and best.ms and (best.host_ms or 0.0) > HOST_BOUND * best.ms:
            words += ", limited by Python"
        yield words
