"""Progress of a run as seen in its output folder."""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.torture.processes import StartedRun

_NAME = re.compile(r"checkpoint_epoch_(\d{5})(?:_sample_(\d{9}))?\.pyth")
_RESUMED = re.compile(r"(?:Resuming from|Training is complete:) (\S+\.pyth)")
RESTART = "Restart 1 of "
_ITERATION = re.compile(r'"epoch": "(\d+)/.*"iter": "(\d+)/(\d+)"')


class SavedPosition(NamedTuple):
    """Progress of a training: completed epochs, and samples of the next."""

    epochs: int
    samples: int


class Trigger(NamedTuple):
    """When to inject a fault: `delay` seconds after the `times`-th log line of a phase."""

    phase: str
    times: int
    delay: float


# Texts in the log; "writing" is detected by a temporary file.
_LOG_TEXTS = {
    "train": '"train_iter"',
    "writing": "(not in the log)",
    "val": '"val_epoch"',
    "test": '"test_iter"',
}
PHASES = ("start", *_LOG_TEXTS)  # in their order


@dataclass(frozen=True)
class RunFolder:
    """An OUTPUT_DIR, read without the code of the package."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, start: int = 0) -> str:
        try:
            return (self.path / "stdout.log").read_bytes()[start:].decode(errors="replace")
        except OSError:
            return ""

    def log_before_restart(self, start: int) -> str:
        """Return the log until the launcher restarts the ranks for the first time."""
        return self.log(start).partition(RESTART)[0]

    def log_size(self) -> int:
        try:
            return (self.path / "stdout.log").stat().st_size
        except OSError:
            return 0

    def positions(self) -> dict[str, SavedPosition]:
        """Return the checkpoints by name, the one with the most progress last."""
        found = {
            name: SavedPosition(int(match[1]), int(match[2] or 0))
            for name in _list_folder(self.checkpoints)
            if (match := _NAME.fullmatch(name))
        }
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def unfinished(self) -> list[str]:
        """Return temporary files."""
        return [
            name
            for folder in (self.path, self.checkpoints)
            for name in _list_folder(folder)
            if name.startswith(".writing-") or name.endswith(".tmp")
        ]

    def resumed_from(self, start: int) -> str | None:
        """Return the name of the checkpoint that the log names as resumed."""
        match = _RESUMED.search(self.log_before_restart(start))
        return os.path.basename(match[1]) if match else None

    def last_iteration(self, start: int, global_batch: int) -> SavedPosition | None:
        """Return the position after the last logged iteration."""
        lines = [line for line in self.log(start).splitlines() if '"train_iter"' in line]
        match = _ITERATION.search(lines[-1]) if lines else None
        if match is None:
            return None
        epoch, batch, batches = map(int, match.groups())
        return (
            SavedPosition(epoch, 0)
            if batch == batches
            else SavedPosition(epoch - 1, batch * global_batch)
        )

    def scored(self) -> dict[str, set[int]]:
        """Return the indices of the scored videos, by fingerprint of the test."""
        found: dict[str, set[int]] = {}
        for path in self.path.glob("test_scores.*.part"):
            header, _, records = path.read_bytes().partition(b"\n")
            try:
                content = json.loads(header)
            except ValueError:
                continue
            size = 16 + 4 * content["classes"]
            videos = found.setdefault(content["test"], set())
            for begin in range(0, len(records), size + 4):
                record, check = records[begin : begin + size], records[begin + size :][:4]
                if len(check) < 4 or int.from_bytes(check, "little") != zlib.crc32(record):
                    break
                videos.add(int.from_bytes(record[:8], "little"))
        return found

    def lock_holder(self) -> int | None:
        """Return the process in the lock file, which a killed run leaves; None without a file."""
        try:
            match = re.match(r"process (\d+) ", (self.path / ".lock").read_text())
        except OSError:
            return None
        return int(match[1]) if match else None

    def has_scores_of_other_weights(self, checkpoint: str) -> bool:
        """Return whether a checkpoint was written after the scores of an interrupted test."""
        path, scores = self.checkpoints / checkpoint, self.path.glob("test_scores.*.part")
        return path.exists() and any(
            score.stat().st_mtime < path.stat().st_mtime for score in scores
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the content of all files except the lock file, which a killed run leaves."""
        return {
            str(path.relative_to(self.path)): _content(path)
            for path in sorted(self.path.rglob("*"))
            if path.name != ".lock"
        }

    def wait_for(self, run: StartedRun, trigger: Trigger, log_start: int, seconds: float) -> bool:
        """Wait for the trigger; return whether the run is still alive."""
        deadline = time.monotonic() + seconds
        while run.alive() and time.monotonic() < deadline:
            if self._is_reached(trigger, log_start):
                time.sleep(trigger.delay)
                return run.alive()
            time.sleep(0.001 if trigger.phase == "writing" else 0.02)
        return False

    def _is_reached(self, trigger: Trigger, log_start: int) -> bool:
        if trigger.phase == "start":
            return True
        if trigger.phase == "writing" and self.log_size() > log_start and self.unfinished():
            return True
        log = self.log(log_start)
        passed = trigger.phase != "test" and _LOG_TEXTS["test"] in log
        return passed or log.count(_LOG_TEXTS[trigger.phase]) >= trigger.times


def _content(path: Path) -> Any:
    """Return the bytes of a file, or the size of a huge sparse one."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    return path.read_bytes() if size < 2**30 else size


def _list_folder(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
