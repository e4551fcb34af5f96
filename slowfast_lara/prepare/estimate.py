"""What preparing a set will take, and how much faster training will read it: by 20 videos."""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

from slowfast_lara.data.lists import fits_in_a_list
from slowfast_lara.errors import RunError, printable
from slowfast_lara.files import write_text
from slowfast_lara.prepare.prepare import CannotWrite, Video, find_set, in_bytes, prepare_one
from slowfast_lara.prepare.reencode import Options, Outcome
from slowfast_lara.prepare.workers import in_processes

if TYPE_CHECKING:
    from slowfast_lara.data.kinetics import Kinetics

SAMPLE = 20
_READS = 5  # of each video


def estimate(videos: str, out: str, options: Options, *, jobs: int, time_limit: float) -> int:
    """Prepare 20 videos, spread over the set, into a folder that is removed; how many failed."""
    found = find_set(videos, out)
    step = max(len(found) / SAMPLE, 1)
    chosen = [found[int(number * step)] for number in range(min(SAMPLE, len(found)))]
    with tempfile.TemporaryDirectory() as folder:
        todo = [
            video._replace(result=os.path.join(folder, f"{number}.mp4"))
            for number, video in enumerate(chosen)
        ]
        results = dict(in_processes(partial(prepare_one, options), todo, jobs, time_limit))
        done: dict[Video, Outcome] = {}
        for video, outcome in results.items():
            if isinstance(outcome, CannotWrite):
                raise RunError(f"{outcome.path}: {outcome.reason}")
            if isinstance(outcome, Outcome):
                done[video] = outcome
            else:
                print(f"{printable(video.source)}: {outcome.reason}")
        print(f"{len(done)} of {len(chosen)} videos prepared as a trial, of {len(found)}")
        if done:
            _tell_cost(found, todo, done, jobs)
            _tell_reading(folder, [video for video in done if fits_in_a_list(video.source)])
    return len(chosen) - len(done)


def _tell_cost(
    found: list[Video], tried: list[Video], done: dict[Video, Outcome], jobs: int
) -> None:
    """Time and space are taken to grow with the bytes of the sources."""
    share = _bytes(found) / max(_bytes(tried), 1)
    hours = sum(outcome.seconds for outcome in done.values()) * share / jobs / 3600
    size = sum(outcome.disk_space for outcome in done.values()) * share
    print(
        f"the whole set: about {hours:.2g} hours by {jobs} processes, "
        f"{in_bytes(_bytes(found))} to about {in_bytes(size)}"
    )


def _bytes(videos: list[Video]) -> int:
    return sum(video.version[0] for video in videos if video.version)


def _tell_reading(folder: str, videos: list[Video]) -> None:
    """The time of whole training samples, one thread, originals and results in turns."""
    if not videos:
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for video in videos:
        if not os.path.islink(video.result):  # made a moment ago, it would not be in an index yet
            os.utime(video.result, (0, 0))
    datasets = (
        _dataset(os.path.join(folder, "before"), [video.source for video in videos]),
        _dataset(os.path.join(folder, "after"), [video.result for video in videos]),
    )
    seconds = [0.0, 0.0]
    for epoch in range(-1, _READS):
        for index in range(len(videos)):
            for number, dataset in enumerate(datasets):
                start = time.perf_counter()
                dataset[(max(epoch, 0), index)]
                if epoch >= 0:  # the first round is to warm up
                    seconds[number] += time.perf_counter() - start
    torch.set_num_threads(threads)
    before, after = (1000 * total / _READS / len(videos) for total in seconds)
    print(
        f"a training sample (16 frames, every 4th, 224 pixels): {before:.1f} ms of the "
        f"originals, {after:.1f} ms of the results: {before / after:.1f} times as fast"
    )


def _dataset(folder: str, paths: list[str]) -> Kinetics:
    from slowfast_lara.config import get_cfg
    from slowfast_lara.data.kinetics import Kinetics

    write_text(
        os.path.join(folder, "train.csv"), "".join(f"{os.path.abspath(path)} 0\n" for path in paths)
    )
    cfg = get_cfg()
    cfg.DATA.PATH_TO_DATA_DIR = folder
    cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = 16, 4
    return Kinetics(cfg, "train")
