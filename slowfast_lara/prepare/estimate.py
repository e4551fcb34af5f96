"""Estimate of the time, space and reading speed of a prepared set, from 20 of its videos."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from slowfast_lara.data.lists import fits_in_a_list
from slowfast_lara.errors import RunError, printable
from slowfast_lara.files import write_text
from slowfast_lara.prepare.prepare import Task, find_tasks, format_bytes, prepare_one
from slowfast_lara.prepare.reencode import Options, PreparedVideo
from slowfast_lara.prepare.workers import in_processes

if TYPE_CHECKING:
    from slowfast_lara.data.kinetics import Kinetics

SAMPLE = 20
_READS = 5  # per video


def estimate(videos: str, out: str, options: Options, *, jobs: int, time_limit: float) -> int:
    """Prepare 20 videos into a temporary folder, print the estimate, return how many failed."""
    tasks = find_tasks(videos, out)
    step = max(len(tasks) / SAMPLE, 1)
    chosen = [tasks[int(number * step)] for number in range(min(SAMPLE, len(tasks)))]
    with tempfile.TemporaryDirectory() as folder:
        sample = [
            task._replace(result=os.path.join(folder, f"{number}.mp4"))
            for number, task in enumerate(chosen)
        ]
        done: dict[Task, PreparedVideo] = {}
        for task, result in in_processes(partial(prepare_one, options), sample, jobs, time_limit):
            if isinstance(result, OSError):
                raise RunError(f"{result.filename}: {result.strerror}")
            if isinstance(result, PreparedVideo):
                done[task] = result
            else:
                print(f"{printable(task.source)}: {result.reason}")
        print(f"prepared {len(done)} of {len(sample)} videos as a trial, {len(tasks)} in total")
        if done:
            # Time and space are assumed to grow with the bytes of the sources.
            scale = _total_bytes(tasks) / max(_total_bytes(sample), 1)
            hours = sum(result.seconds for result in done.values()) * scale / jobs / 3600
            size = sum(result.disk_space for result in done.values()) * scale
            print(
                f"the whole set: about {hours:.2g} hours with {jobs} processes, "
                f"{format_bytes(_total_bytes(tasks))} to about {format_bytes(size)}"
            )
        if readable := [task for task in done if fits_in_a_list(task.source)]:
            before, after = _measure_reading(folder, readable)
            print(
                f"a training sample (16 frames, every 4th, 224 pixels): {before:.1f} ms from the "
                f"originals, {after:.1f} ms from the results: {before / after:.1f} times as fast"
            )
    return len(sample) - len(done)


def _total_bytes(tasks: Iterable[Task]) -> int:
    return sum(task.version[0] for task in tasks if task.version)


def _measure_reading(folder: str, tasks: list[Task]) -> list[float]:
    """Milliseconds per training sample of the originals and the results, with one thread."""
    import torch  # here for a fast start of the other data commands

    for task in tasks:
        if not os.path.islink(task.result):  # the timestamp cache ignores recently changed files
            os.utime(task.result, (0, 0))
    datasets = (
        _dataset(os.path.join(folder, "before"), [task.source for task in tasks]),
        _dataset(os.path.join(folder, "after"), [task.result for task in tasks]),
    )
    threads, seconds = torch.get_num_threads(), [0.0, 0.0]
    torch.set_num_threads(1)
    for epoch in range(-1, _READS):  # the first is a warm-up
        for index in range(len(tasks)):
            for number, dataset in enumerate(datasets):
                start = time.perf_counter()
                dataset[(max(epoch, 0), index)]
                seconds[number] += (time.perf_counter() - start) * (epoch >= 0)
    torch.set_num_threads(threads)
    return [1000 * total / _READS / len(tasks) for total in seconds]


def _dataset(folder: str, paths: list[str]) -> Kinetics:
    from slowfast_lara.config import get_cfg
    from slowfast_lara.data.kinetics import Kinetics

    lines = [f"{os.path.abspath(path)} 0\n" for path in paths]
    write_text(os.path.join(folder, "train.csv"), "".join(lines))
    cfg = get_cfg()
    cfg.DATA.PATH_TO_DATA_DIR = folder
    cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = 16, 4
    return Kinetics(cfg, "train")
