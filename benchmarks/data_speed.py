"""Video reading speed, compared with PySlowFast's Kinetics dataset and an earlier checkout.

There are three tasks: all test views of a video; training samples; and training samples from
copies of the videos with a short side of 720 pixels and a long key-frame interval, as in many
downloaded videos. Training samples are also read from videos prepared by `slowfast-lara data
prepare`.

PyTorch, OpenCV and the decoder use one thread, and the results are CPU time. The readers take turns
after every sample, so that other load on the machine slows all of them alike. The first round is
not measured, because it fills the page cache and the package's timestamp cache.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import av
import cv2
import torch
from fvcore.common.config import CfgNode
from slowfast.datasets.kinetics import Kinetics as PySlowFastKinetics

from benchmarks import checkout_process
from benchmarks.checkout_process import reading_config, timed_read
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.video import decoded_frames, open_video
from slowfast_lara.errors import RunError
from slowfast_lara.files import write_text
from slowfast_lara.prepare.reencode import Options, prepare_video

# Enlarged videos: short side in pixels, and key-frame interval in frames.
LARGE, FAR_APART = 720, 250
OURS, PREPARED, BEFORE, PREPARED_BEFORE, PYSLOWFAST = (
    "ours",
    "ours, prepared",
    "before",
    "before, prepared",
    "PySlowFast",
)

# (epoch, video) -> CPU seconds, and a digest of the pixels (None for PySlowFast).
Reader = Callable[[int, int], tuple[float, int | None]]
# (folder of lists, mode, epoch, video) -> CPU seconds and digest of another checkout.
CheckoutReader = Callable[[str, str, int, int], tuple[float, int]]


class Reading(NamedTuple):
    """Mean milliseconds of each reader for one task; `pixels` reports differences from `before`."""

    task: str
    times: dict[str, float]
    pixels: str = ""


@dataclass
class ReadingTable(ResultTable):
    readings: list[Reading]

    def cells(self) -> Cells:
        rows = [["task", "reader", "ms", "speed-up over PySlowFast", "over before"]]
        for task, times, _ in self.readings:
            for reader, ms in times.items():
                base = times.get({OURS: BEFORE, PREPARED: PREPARED_BEFORE}.get(reader, ""))
                ratio = f"{base / ms:.2f}" if base else ""
                rows.append([task, reader, f"{ms:.1f}", f"{times[PYSLOWFAST] / ms:.2f}", ratio])
        return rows

    def footer(self) -> list[str]:
        return [f"{task}: {pixels}" for task, _, pixels in self.readings if pixels]


def reading_times(
    videos: Sequence[str],
    *,
    frames: int,
    rate: int,
    rounds: int,
    train_samples: int,
    before: str | None = None,
) -> ReadingTable:
    """Measure all readers on all tasks; `before` is a checkout of an earlier version."""
    threads, opencv_threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        given = _config(_link(videos, f"{folder}/given"), frames, rate)
        large = _config(_enlarge(videos, f"{folder}/large"), frames, rate)
        checkout_read = None
        if before is not None:
            checkout_read = stack.enter_context(_checkout_reader(before, str(frames), str(rate)))
        samples = rounds * train_samples
        readings = [
            _compare("all views of a video", given, "test", rounds, checkout_read),
            _compare("a training sample", given, "train", samples, checkout_read),
            _compare(
                f"a training sample, {LARGE} pixels, key frames {FAR_APART} apart",
                *(large, "train", samples, checkout_read),
            ),
        ]
    torch.set_num_threads(threads)
    cv2.setNumThreads(opencv_threads)
    return ReadingTable("reading of videos, CPU time of one thread", readings)


def _compare(
    task: str, cfg: CfgNode, mode: str, epochs: int, checkout_read: CheckoutReader | None
) -> Reading:
    ours, theirs = Kinetics(cfg, mode), PySlowFastKinetics(cfg, mode)
    views = len(theirs) // len(ours)  # dataset items per video in PySlowFast

    def read_theirs(epoch: int, video: int) -> tuple[float, None]:
        start = time.process_time()
        for view in range(views):
            theirs[video * views + view]
        return time.process_time() - start, None

    cfgs = {OURS: (BEFORE, cfg)}
    if mode == "train":
        cfgs[PREPARED] = (PREPARED_BEFORE, _prepare(cfg))
    readers: dict[str, Reader] = {PYSLOWFAST: read_theirs}
    for name, (name_before, its_cfg) in cfgs.items():
        readers[name] = partial(timed_read, Kinetics(its_cfg, mode))
        if checkout_read is not None:
            folder = its_cfg.DATA.PATH_TO_DATA_DIR
            readers[name_before] = partial(checkout_read, folder, mode)
    times: dict[str, list[float]] = {name: [] for name in readers}
    same: list[bool] = []
    for epoch in range(-1, epochs):
        for video in range(len(ours)):
            digests = {}
            for name, read in readers.items():
                seconds, digests[name] = read(max(epoch, 0), video)
                if epoch >= 0:
                    times[name].append(seconds * 1000)
            same += [digests[a] == digests[b] for a, (b, _) in cfgs.items() if b in digests]
    pixels = f"{same.count(False)} of {len(same)} clips differ from before" if same else ""
    return Reading(task, {name: statistics.mean(values) for name, values in times.items()}, pixels)


def checkout_command(checkout: str, *arguments: str) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` that run checkout_process.py with a checkout's package."""
    return {
        "args": [sys.executable, "-P", checkout_process.__file__, *arguments],
        "env": {**os.environ, "PYTHONPATH": os.path.abspath(checkout)},
        "text": True,
    }


@contextlib.contextmanager
def _checkout_reader(checkout: str, frames: str, rate: str) -> Iterator[CheckoutReader]:
    process = subprocess.Popen(
        **checkout_command(checkout, "read", frames, rate),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def answer(line: str = "") -> list[str]:
        process.stdin.write(line)  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        words = process.stdout.readline().split()  # type: ignore[union-attr]
        if not words:
            raise RunError(f"{checkout}: the process that reads the videos has exited")
        return words

    def read(folder: str, mode: str, epoch: int, video: int) -> tuple[float, int]:
        seconds, digest = answer(f"{folder} {mode} {epoch} {video}\n")
        return float(seconds), int(digest)

    with process:
        try:
            answer()
            yield read
        finally:
            process.kill()


def _link(videos: Sequence[str], folder: str) -> list[str]:
    """Create symlinks without spaces in their names: PySlowFast splits list lines at spaces."""
    os.mkdir(folder)
    links = []
    for number, video in enumerate(videos):
        links.append(f"{folder}/{number}{os.path.splitext(video)[1]}")
        os.symlink(os.path.abspath(video), links[-1])
    return links


def _enlarge(videos: Sequence[str], folder: str) -> list[str]:
    os.mkdir(folder)
    results = [f"{folder}/{number}.mp4" for number in range(len(videos))]
    for video, result in zip(videos, results):
        with open_video(video) as (container, stream), av.open(result, "w") as out:
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


def _prepare(cfg: CfgNode) -> CfgNode:
    """Prepare the training videos; returns a config that reads them."""
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
        if not os.path.islink(video):  # the timestamp cache skips recently changed files
            os.utime(video, (0, 0))
    return reading_config(folder, frames, rate)
