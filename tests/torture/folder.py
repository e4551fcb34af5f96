"""What an output folder tells: how far its run is, and what is in its files."""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.torture.processes import Started

_NAME = re.compile(r"checkpoint_epoch_(\d{5})(?:_sample_(\d{9}))?\.pyth")
_CONTINUED = re.compile(r"(?:Continuing (\S+): \d+ whole|Training is finished: .* in (\S+)$)", re.M)
_ITERATION = re.compile(r'"epoch": "(\d+)/.*"iter": "(\d+)/(\d+)"')


class Place(NamedTuple):
    """How far a training is: whole epochs, and samples of the next."""

    epochs: int
    samples: int


class Moment(NamedTuple):
    """When to strike: at the `times`-th sign of a phase after a start, and `delay` seconds on."""

    phase: str
    times: int
    delay: float


# Lines of the log, or none for what is seen otherwise.
_SIGNS = {
    "train": '"train_iter"',
    "writing": "a file that is being written, not a line",
    "val": '"val_epoch"',
    "test": '"test_iter"',
}
PHASES = ("start", *_SIGNS)  # in their order


@dataclass(frozen=True)
class RunFolder:
    """An OUTPUT_DIR, read without the package's own code."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, start: int = 0) -> str:
        try:
            return (self.path / "stdout.log").read_bytes()[start:].decode(errors="replace")
        except OSError:
            return ""

    def log_size(self) -> int:
        try:
            return (self.path / "stdout.log").stat().st_size
        except OSError:
            return 0

    def places(self) -> dict[str, Place]:
        """The checkpoints of the training by name, the furthest last."""
        found = {
            name: Place(int(match[1]), int(match[2] or 0))
            for name in _names(self.checkpoints)
            if (match := _NAME.fullmatch(name))
        }
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def unfinished(self) -> list[str]:
        """Files that somebody is writing, or has left."""
        return [
            name
            for folder in (self.path, self.checkpoints)
            for name in _names(folder)
            if name.startswith(".writing-") or name.endswith(".tmp")
        ]

    def continued_from(self, start: int) -> str | None:
        """The name of the checkpoint that the log says a run goes on from."""
        match = _CONTINUED.search(self.log(start))
        return os.path.basename(match[1] or match[2]) if match else None

    def last_iteration(self, start: int, global_batch: int) -> Place | None:
        """The place after the last iteration that is logged."""
        lines = [line for line in self.log(start).splitlines() if '"train_iter"' in line]
        match = _ITERATION.search(lines[-1]) if lines else None
        if match is None:
            return None
        epoch, batch, batches = map(int, match.groups())
        return Place(epoch, 0) if batch == batches else Place(epoch - 1, batch * global_batch)

    def scored(self) -> dict[str, set[int]]:
        """The videos that are in the score files of a test, by its identity."""
        found: dict[str, set[int]] = {}
        for path in self.path.glob("test_scores.*.part"):
            header, _, records = path.read_bytes().partition(b"\n")
            try:
                told = json.loads(header)
            except ValueError:
                continue
            size = 16 + 4 * told["classes"]
            videos = found.setdefault(told["test"], set())
            for begin in range(0, len(records), size + 4):
                record, check = records[begin : begin + size], records[begin + size :][:4]
                if len(check) < 4 or int.from_bytes(check, "little") != zlib.crc32(record):
                    break
                videos.add(int.from_bytes(record[:8], "little"))
        return found

    def snapshot(self) -> dict[str, Any]:
        """All files, but the lock, which a killed run leaves and the next one removes."""
        return {
            str(path.relative_to(self.path)): _content(path)
            for path in sorted(self.path.rglob("*"))
            if path.name != ".lock"
        }

    def wait_for(self, run: Started, moment: Moment, log_start: int, seconds: float) -> bool:
        """Wait for the moment; whether the run is still going on then."""
        deadline = time.monotonic() + seconds
        while run.alive() and time.monotonic() < deadline:
            if self._shows(moment, log_start):
                time.sleep(moment.delay)
                return run.alive()
            time.sleep(0.001 if moment.phase == "writing" else 0.02)
        return False

    def _shows(self, moment: Moment, log_start: int) -> bool:
        if moment.phase == "start":
            return True
        if moment.phase == "writing" and self.log_size() > log_start and self.unfinished():
            return True
        log = self.log(log_start)
        passed = moment.phase != "test" and _SIGNS["test"] in log  # too late for it
        return passed or log.count(_SIGNS[moment.phase]) >= moment.times


def _content(path: Path) -> Any:
    """The bytes of a file, or what they would be of one that is as large as no real one."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    return path.read_bytes() if size < 2**30 else size


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
