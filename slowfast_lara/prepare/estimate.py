"""Estimate of the time and space that a prepared set takes, from 20 of its videos."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from functools import partial

from slowfast_lara.errors import RunError, printable
from slowfast_lara.prepare.prepare import Task, find_tasks, format_bytes, prepare_one
from slowfast_lara.prepare.reencode import Options, PreparedVideo
from slowfast_lara.prepare.workers import in_processes

SAMPLE = 20


def estimate(videos: str, out: str, options: Options, *, jobs: int, time_limit: float) -> int:
    """Prepare 20 videos into a temporary folder, print the estimate, return how many failed."""
    tasks = find_tasks(videos, out)
    step = max(len(tasks) / SAMPLE, 1)
    chosen = [tasks[int(number * step)] for number in range(min(SAMPLE, len(tasks)))]
    done: list[PreparedVideo] = []
    with tempfile.TemporaryDirectory() as folder:
        sample = [
            task._replace(result=os.path.join(folder, f"{number}.mp4"))
            for number, task in enumerate(chosen)
        ]
        for task, result in in_processes(partial(prepare_one, options), sample, jobs, time_limit):
            if isinstance(result, OSError):
                raise RunError(f"{result.filename}: {result.strerror}")
            if isinstance(result, PreparedVideo):
                done.append(result)
            else:
                print(f"{printable(task.source)}: {result.reason}")
    print(f"prepared {len(done)} of {len(sample)} videos as a trial, {len(tasks)} in total")
    if done:
        # Time and space are assumed to grow with the bytes of the sources.
        scale = _total_bytes(tasks) / max(_total_bytes(sample), 1)
        hours = sum(result.seconds for result in done) * scale / jobs / 3600
        size = sum(result.disk_space for result in done) * scale
        print(
            f"the whole set: about {hours:.2g} hours with {jobs} processes, "
            f"{format_bytes(_total_bytes(tasks))} to about {format_bytes(size)}"
        )
    return len(sample) - len(done)


def _total_bytes(tasks: Iterable[Task]) -> int:
    return sum(task.version[0] for task in tasks if task.version)
