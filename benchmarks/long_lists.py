"""Cost of long lists: CPU seconds to read them, and memory of the DataLoader workers.

The lists are generated, in the format of Kinetics (`path label`) and of Something-Something-v2's
extracted frames (one line per frame, and the official JSON files).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import slowfast_lara
from benchmarks.data_speed import checkout_command
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.data.frame_lists import HEADER
from slowfast_lara.errors import RunError, first_line

FRAMES_PER_VIDEO, CLASSES = 47, 174
COLUMNS = ["list", "checkout", "workers", "seconds", "MB", "MB of workers", "added by look-up"]


class ListCost(NamedTuple):
    name: str
    checkout: str
    workers: str
    seconds: float
    megabytes: float  # taken by the list in the main process
    worker_megabytes: float  # private memory of all workers, after the look-up
    added: float  # part of worker_megabytes that looking up the videos added


@dataclass
class ListTable(ResultTable):
    costs: list[ListCost]

    def cells(self) -> Cells:
        rows = [[*cost[:3], *(f"{figure:.1f}" for figure in cost[3:])] for cost in self.costs]
        return [COLUMNS, *rows]


def list_costs(videos: int, frames: int, workers: int, start: str, before: str | None) -> ListTable:
    checkouts = {"this": os.path.dirname(slowfast_lara.__path__[0])}
    if before:
        checkouts["before"] = os.path.abspath(before)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        lists = {
            f"{videos:,} videos": ("Kinetics", _write_videos(Path(folder, "videos"), videos)),
            f"{frames:,} frames": ("Ssv2", _write_frames(Path(folder, "frames"), frames)),
        }
        for name, (kind, path) in lists.items():
            for version, checkout in checkouts.items():
                figures = _measure(checkout, [kind, path, str(workers), start])
                costs.append(ListCost(name, version, f"{workers} by {start}", *figures))
    return ListTable("cost of long lists", costs)


def _measure(checkout: str, arguments: list[str]) -> list[float]:
    command = checkout_command(checkout, "lists", *arguments)
    result = subprocess.run(**command, capture_output=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["the process ended without a message"]
        raise RunError(f"{checkout}: {first_line(ValueError(lines[-1]))}")
    return [float(word) for word in result.stdout.split()]


def _write_videos(folder: Path, count: int) -> str:
    folder.mkdir()
    with open(folder / "train.csv", "w", encoding="utf-8") as file:
        for number in range(count):
            name = f"class_{number % 400:03d}/{number:011x}_000010_000020.mp4"
            file.write(f"{name} {number % 400}\n")
    first = folder / "class_000" / f"{0:011x}_000010_000020.mp4"
    first.parent.mkdir()
    first.touch()  # a dataset checks that some of its videos exist
    return str(folder)


def _write_frames(folder: Path, count: int) -> str:
    folder.mkdir()
    videos = -(-count // FRAMES_PER_VIDEO)
    with open(folder / "train.csv", "w", encoding="utf-8") as file:
        file.write(HEADER + "\n")
        for video in range(1, videos + 1):
            frames = min(FRAMES_PER_VIDEO, count - (video - 1) * FRAMES_PER_VIDEO)
            file.writelines(
                f'{video} {video - 1} {frame} {video}/{video}_{frame + 1:05d}.jpg ""\n'
                for frame in range(frames)
            )
    templates = [f"Moving something {number} times" for number in range(CLASSES)]
    prefix = "something-something-v2-"
    numbers = {template: str(number) for number, template in enumerate(templates)}
    (folder / f"{prefix}labels.json").write_text(json.dumps(numbers))
    entries = [
        {"id": str(video), "label": "moving a cup", "template": templates[video % CLASSES]}
        for video in range(1, videos + 1)
    ]
    (folder / f"{prefix}train.json").write_text(json.dumps(entries))
    (folder / "1").mkdir()
    (folder / "1" / "1_00001.jpg").touch()
    return str(folder)
