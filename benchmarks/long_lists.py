"""What long lists cost: processor seconds until they are read, and megabytes of the workers.

The lists are made on the spot, in the form of Kinetics (`path label`) and of
Something-Something-v2's extracted frames (a line a frame, and the official JSON files).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import slowfast_lara
from benchmarks import long_lists_process
from slowfast_lara.analysis.tables import aligned_table
from slowfast_lara.data.frame_lists import HEADER
from slowfast_lara.errors import RunError, first_line

FRAMES_OF_A_VIDEO, CLASSES = 47, 174
COLUMNS = ["list", "by", "workers", "seconds", "MB", "MB of workers", "copied"]


class Cost(NamedTuple):
    name: str
    by: str
    method: str
    seconds: float
    megabytes: float  # of the process that has read the list
    of_workers: float  # that all workers have for themselves, after an epoch
    copied: float  # of these, what came while they looked at the list


def list_costs(
    videos: int, frames: int, workers: int, start: str, before: str | None
) -> list[Cost]:
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
            for by, checkout in checkouts.items():
                figures = _measure(checkout, [kind, path, str(workers), start])
                costs.append(Cost(name, by, f"{workers} by {start}", *figures))
    return costs


def _measure(checkout: str, arguments: list[str]) -> list[float]:
    result = subprocess.run(
        [sys.executable, "-P", long_lists_process.__file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": checkout},
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it ended"]
        raise RunError(f"{checkout}: {first_line(ValueError(lines[-1]))}")
    return [float(word) for word in result.stdout.split()]


def as_table(costs: list[Cost]) -> str:
    rows = [[*cost[:3], *(f"{figure:.1f}" for figure in cost[3:])] for cost in costs]
    return aligned_table([COLUMNS, *rows])


def _write_videos(folder: Path, count: int) -> str:
    folder.mkdir()
    with open(folder / "train.csv", "w", encoding="utf-8") as file:
        for number in range(count):
            name = f"class_{number % 400:03d}/{number:011x}_000010_000020.mp4"
            file.write(f"{name} {number % 400}\n")
    first = folder / "class_000" / f"{0:011x}_000010_000020.mp4"
    first.parent.mkdir()
    first.touch()  # a few of a list's videos are looked for
    return str(folder)


def _write_frames(folder: Path, count: int) -> str:
    folder.mkdir()
    videos = -(-count // FRAMES_OF_A_VIDEO)
    with open(folder / "train.csv", "w", encoding="utf-8") as file:
        file.write(HEADER + "\n")
        for video in range(1, videos + 1):
            frames = min(FRAMES_OF_A_VIDEO, count - (video - 1) * FRAMES_OF_A_VIDEO)
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
