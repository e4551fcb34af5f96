"""How fast videos are read, against PySlowFast's own Kinetics dataset and an earlier checkout.

PyTorch and OpenCV are held to one thread, and videos are decoded by one. All read in turns,
sample by sample, so that other work on the machine slows them alike, and what is told is
processor time. The videos are read as they are; enlarged, with key frames far apart, as
downloads often are; and both once prepared (`slowfast-lara data prepare`). Each is read once
before it counts: the system then has it in memory, and ours in its index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import av
import torch
from fvcore.common.config import CfgNode
from slowfast.datasets.kinetics import Kinetics as PySlowFastKinetics

from benchmarks import reading_process
from slowfast_lara.config import get_cfg
from slowfast_lara.data.decode import decoded_frames, opened
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.errors import RunError
from slowfast_lara.files import write_text
from slowfast_lara.prepare.reencode import Options, prepare_video

# The enlarged videos: the short side, and the frames from one key frame to the next.
LARGE, FAR_APART = 720, 250
OURS, PREPARED, PYSLOWFAST, BEFORE = "ours", "ours, prepared", "PySlowFast", "ours before"

# Of a sample (lists, epoch, video): the seconds, and a digest of the clip.
Elsewhere = Callable[[str, int, int], tuple[float, str]]


class Reading(NamedTuple):
    """Milliseconds of a task, by who reads; of how many samples the pixels changed."""

    task: str
    times: dict[str, float]
    changed: str = ""


def reading_times(
    videos: Sequence[str],
    *,
    frames: int,
    rate: int,
    rounds: int,
    train_samples: int,
    before: str | None = None,
) -> list[Reading]:
    """All views of a video, and training samples."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        given = _config(_linked(videos, f"{folder}/given"), frames, rate)
        large = _config(_enlarged(videos, f"{folder}/large"), frames, rate)
        readings = [_compare_tests(given, rounds)]
        for task, cfg in (
            ("a training sample", given),
            (f"a training sample, {LARGE} pixels, key frames {FAR_APART} apart", large),
        ):
            readings.append(_compare_training(task, cfg, rounds * train_samples, before))
    torch.set_num_threads(threads)
    return readings


def as_text(readings: Sequence[Reading]) -> str:
    lines = []
    for task, times, changed in readings:
        lines.append(f"{task}: " + ", ".join(f"{who} {ms:.1f} ms" for who, ms in times.items()))
        lines += [
            f"  {who} is {times[slower] / times[who]:.2f} times as fast as {slower}"
            for who in (OURS, PREPARED)
            for slower in (PYSLOWFAST, BEFORE)
            if who in times and slower in times
        ]
        if changed:
            lines.append(f"  {changed}")
    return "\n".join(lines)


def _compare_tests(cfg: CfgNode, rounds: int) -> Reading:
    ours, theirs = Kinetics(cfg, "test"), PySlowFastKinetics(cfg, "test")
    views = len(theirs) // len(ours)
    readers: dict[str, Callable[[int, int], Any]] = {
        OURS: lambda epoch, video: ours[video],
        PYSLOWFAST: lambda epoch, video: [theirs[video * views + view] for view in range(views)],
    }
    return Reading("all views of a video", _times(readers, rounds, len(ours)))


def _compare_training(task: str, cfg: CfgNode, epochs: int, before: str | None) -> Reading:
    ours, theirs = Kinetics(cfg, "train"), PySlowFastKinetics(cfg, "train")
    prepared_cfg = _prepared(cfg)
    prepared = Kinetics(prepared_cfg, "train")
    readers: dict[str, Callable[[int, int], Any]] = {
        OURS: lambda epoch, video: ours[(epoch, video)],
        PREPARED: lambda epoch, video: prepared[(epoch, video)],
        PYSLOWFAST: lambda epoch, video: theirs[video],
    }
    if before is None:
        return Reading(task, _times(readers, epochs, len(ours)))
    pairs = {BEFORE: (cfg, ours), "ours before, prepared": (prepared_cfg, prepared)}
    digests: list[bool] = []
    with _elsewhere(before, [pair[0] for pair in pairs.values()]) as read:
        for name, pair in pairs.items():
            readers[name] = partial(_read_elsewhere, read, *pair, digests)
        times = _times(readers, epochs, len(ours))
    changed = f"pixels that are not those of before: {digests.count(False)} of {len(digests)} clips"
    return Reading(task, times, changed)


def _read_elsewhere(
    read: Elsewhere, cfg: CfgNode, dataset: Kinetics, digests: list[bool], epoch: int, video: int
) -> float:
    """The seconds; to the `digests`, whether the pixels are those that we read."""
    seconds, digest = read(cfg.DATA.PATH_TO_DATA_DIR, epoch, video)
    sample: Any = dataset[(epoch, video)]
    digests.append(hashlib.sha256(sample.clip.numpy()).hexdigest() == digest)
    return seconds


def _times(
    readers: dict[str, Callable[[int, int], Any]], epochs: int, videos: int
) -> dict[str, float]:
    """Mean milliseconds of the readers, which read every (epoch, video) in turns.

    A reader that reads in another process returns its seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in readers}
    for epoch in range(-1, epochs):
        for video in range(videos):
            for name, read in readers.items():
                start = time.process_time()
                result = read(max(epoch, 0), video)
                spent = result if isinstance(result, float) else time.process_time() - start
                if epoch >= 0:  # the first round is to warm up
                    times[name].append(spent * 1000)
    return {name: statistics.mean(all_times) for name, all_times in times.items()}


@contextlib.contextmanager
def _elsewhere(checkout: str, cfgs: Sequence[CfgNode]) -> Iterator[Elsewhere]:
    """Reads by another checkout."""
    data = cfgs[0].DATA
    folders = [cfg.DATA.PATH_TO_DATA_DIR for cfg in cfgs]
    sizes = [str(data.NUM_FRAMES), str(data.SAMPLING_RATE)]
    process = subprocess.Popen(
        [sys.executable, "-P", reading_process.__file__, *sizes, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.path.abspath(checkout)},
    )

    def answer(line: str = "") -> list[str]:
        process.stdin.write(line)  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        words = process.stdout.readline().split()  # type: ignore[union-attr]
        if not words:
            raise RunError(f"{checkout}: it cannot read the videos; a checkout is expected")
        return words

    def read(folder: str, epoch: int, video: int) -> tuple[float, str]:
        seconds, digest = answer(f"{folder} {epoch} {video}\n")
        return float(seconds), digest

    with process:
        try:
            answer()
            yield read
        finally:
            process.kill()


def _linked(videos: Sequence[str], folder: str) -> list[str]:
    # PySlowFast splits its lists at spaces: it gets the videos by links.
    os.mkdir(folder)
    links = []
    for number, video in enumerate(videos):
        links.append(f"{folder}/{number}{os.path.splitext(video)[1]}")
        os.symlink(os.path.abspath(video), links[-1])
    return links


def _enlarged(videos: Sequence[str], folder: str) -> list[str]:
    os.mkdir(folder)
    results = [f"{folder}/{number}.mp4" for number in range(len(videos))]
    for video, result in zip(videos, results):
        with opened(video, 1) as (container, stream), av.open(result, "w") as out:
            rate = stream.average_rate or 30
            settings = {"g": str(FAR_APART), "sc_threshold": "0", "preset": "veryfast"}
            encoder: Any = out.add_stream("libx264", rate=rate, options=settings)
            for number, frame in enumerate(decoded_frames(container, stream)):
                scale = LARGE / min(frame.width, frame.height)
                width, height = (
                    round(side * scale / 2) * 2 for side in (frame.width, frame.height)
                )
                if not number:
                    encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuv420p"
                larger = frame.reformat(width, height, "yuv420p")
                larger.pts, larger.time_base, larger.pict_type = number, 1 / rate, 0
                out.mux(encoder.encode(larger))
            out.mux(encoder.encode())
    return results


def _prepared(cfg: CfgNode) -> CfgNode:
    """The same for prepared videos."""
    folder = f"{cfg.DATA.PATH_TO_DATA_DIR}_prepared"
    results = []
    for number, video in enumerate(Kinetics(cfg, "train").paths):
        results.append(f"{folder}/{number}.mp4")
        prepare_video(video, results[-1], Options())
    return _config(results, cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE)


def _config(videos: Sequence[str], frames: int, rate: int) -> CfgNode:
    folder = os.path.dirname(videos[0])
    for mode in ("train", "test"):
        write_text(f"{folder}/{mode}.csv", "".join(f"{video} 0\n" for video in videos))
    for video in videos:
        if not os.path.islink(video):  # made a moment ago, it would not be in an index yet
            os.utime(video, (0, 0))
    cfg = get_cfg()
    cfg.DATA.PATH_TO_DATA_DIR = folder
    cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = frames, rate
    cfg.DATA.TEST_CROP_SIZE = cfg.DATA.TRAIN_CROP_SIZE
    return cfg
