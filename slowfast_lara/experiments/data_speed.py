"""How fast videos are read, against PySlowFast's own Kinetics dataset.

PyTorch and OpenCV are held to one thread, and videos are decoded by one. The two
datasets read in turns, sample by sample, so that other work on the machine slows
both alike.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from fvcore.common.config import CfgNode
from slowfast.datasets.kinetics import Kinetics as PySlowFastKinetics
from torch.utils.data import Dataset

from slowfast_lara.config import get_cfg
from slowfast_lara.data.kinetics import Kinetics


def reading_times(
    videos: Sequence[str], *, frames: int, rate: int, rounds: int, train_samples: int
) -> dict[str, dict[str, float]]:
    """For each task, milliseconds of both and the ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cfg = _config(videos, frames, rate, folder)
        results = {
            "all views of a video": _compare_tests(cfg, rounds),
            "a training sample": _compare_training(cfg, rounds * train_samples),
        }
    torch.set_num_threads(threads)
    return results


def as_text(results: dict[str, dict[str, float]]) -> str:
    return "\n".join(
        f"{task}: {figures['ours_ms']:.1f} ms, PySlowFast {figures['pyslowfast_ms']:.1f} ms, "
        f"{figures['ratio']:.2f} times as fast"
        for task, figures in results.items()
    )


def _compare_tests(cfg: CfgNode, rounds: int) -> dict[str, float]:
    ours, theirs = Kinetics(cfg, "test"), PySlowFastKinetics(cfg, "test")
    views = len(theirs) // len(ours)
    return _compare(
        ours,
        theirs,
        [
            ([video], range(video * views, (video + 1) * views))
            for _ in range(rounds)
            for video in range(len(ours))
        ],
    )


def _compare_training(cfg: CfgNode, epochs: int) -> dict[str, float]:
    ours, theirs = Kinetics(cfg, "train"), PySlowFastKinetics(cfg, "train")
    return _compare(
        ours,
        theirs,
        [([(epoch, video)], [video]) for epoch in range(epochs) for video in range(len(ours))],
    )


def _compare(
    ours: Dataset, theirs: Dataset, reads: list[tuple[Iterable[Any], Iterable[Any]]]
) -> dict[str, float]:
    """`reads` are pairs of keys: what one and the other reads for the same result."""
    for dataset, keys in zip((ours, theirs), reads[0]):
        _milliseconds(dataset, keys)  # to warm up
    times = [
        (_milliseconds(ours, our_keys), _milliseconds(theirs, their_keys))
        for our_keys, their_keys in reads
    ]
    our_time, their_time = map(statistics.mean, zip(*times))
    return {"ours_ms": our_time, "pyslowfast_ms": their_time, "ratio": their_time / our_time}


def _milliseconds(dataset: Dataset, keys: Iterable[Any]) -> float:
    start = time.perf_counter()
    for key in keys:
        dataset[key]
    return (time.perf_counter() - start) * 1000


def _config(videos: Sequence[str], frames: int, rate: int, folder: str) -> CfgNode:
    # PySlowFast splits its lists at spaces: it gets the videos by links.
    lines = []
    for number, video in enumerate(videos):
        link = os.path.join(folder, f"{number}{os.path.splitext(video)[1]}")
        os.symlink(os.path.abspath(video), link)
        lines.append(f"{link} 0\n")
    for mode in ("train", "test"):
        with open(os.path.join(folder, f"{mode}.csv"), "w", encoding="utf-8") as file:
            file.writelines(lines)
    cfg = get_cfg()
    cfg.DATA.PATH_TO_DATA_DIR = folder
    cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = frames, rate
    cfg.DATA.TEST_CROP_SIZE = cfg.DATA.TRAIN_CROP_SIZE
    return cfg
