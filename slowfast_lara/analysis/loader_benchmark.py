"""Speed of the training loader, and the time of each stage of loading a sample."""

from __future__ import annotations

import cProfile
import itertools
import math
import os
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode

from slowfast_lara.analysis.measure import best_times
from slowfast_lara.analysis.tables import Cells, ResultTable, aligned_table
from slowfast_lara.data import display, regions, sources, transforms, video
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.loader import Batch, collate, train_loader
from slowfast_lara.data.rand_augment import RandAugment
from slowfast_lara.data.timestamps import TimestampCache
from slowfast_lara.errors import counted

# Stages of loading a sample. The time of a stage is the sum over its functions.
STAGES: dict[str, Sequence[Callable[..., Any]]] = {
    "look up the timestamps": [TimestampCache.get],
    "open the container": [video.open_container],
    "seek and decode": [video.frames_from, video.decoded_frames, sources.read_image],
    "convert to RGB": [display.RgbConverter.__call__],
    "crop and resize": [regions.FrameBuffer.add],
    "flip and jitter": [transforms.random_flip, transforms.color_jitter],
    "RandAugment": [RandAugment.__call__],
    "normalise": [transforms.Normalize.__call__],
}


@dataclass
class LoaderTable(ResultTable):
    """Clips per second by number of workers, and milliseconds per sample by stage."""

    rates: dict[int, float]
    stages: dict[str, float]
    batch_size: int
    demux_ms: float = 0.0  # time to read the timestamps of a video, if not cached
    step_ms: float | None = None  # time of a training step on the user's GPU

    def cells(self) -> Cells:
        rows = [
            [count, f"{rate:.1f}", f"{1000 * self.batch_size / rate:.0f}"]
            for count, rate in self.rates.items()
        ]
        return [["DATA_LOADER.NUM_WORKERS", "clips per second", "ms per batch"], *rows]

    def footer(self) -> list[str]:
        """A table of the stages, and whether the loader keeps up with the GPU."""
        total = sum(self.stages.values())
        rows = [[name, f"{ms:.2f}", f"{100 * ms / total:.1f}"] for name, ms in self.stages.items()]
        stages = aligned_table([["stage", "ms", "%"], *rows])
        lines = ["", f"loading a training sample takes {total:.1f} ms on one core:", stages]
        if self.demux_ms:
            extra = f"{self.demux_ms:.1f} ms more, to read its timestamps"
            lines.append(f"the first read of a video takes {extra}")
        if self.step_ms is not None:
            lines.append(self.verdict(self.step_ms, os.cpu_count() or 1))
        return lines

    def verdict(self, step_ms: float, cores: int) -> str:
        """Describe how many workers keep up with training steps of `step_ms`."""
        needed = self.batch_size * 1000 / step_ms
        start = f"steps of {step_ms:g} ms need {needed:.1f} clips per second"
        enough = [count for count, rate in self.rates.items() if rate >= needed]
        if enough:
            return f"{start}: DATA_LOADER.NUM_WORKERS {min(enough)} is enough"
        most = max(self.rates)
        workers = math.ceil(needed / (self.rates[most] / max(most, 1)))
        if workers <= cores:
            estimate = f"estimated from the rate with {counted(most, 'worker')}"
            return f"{start}: DATA_LOADER.NUM_WORKERS {workers} should be enough ({estimate})"
        return (
            f"{start}: data loading will be the bottleneck. It needs about {workers} workers, but "
            f"there are {cores} cores; `slowfast-lara data prepare` makes videos faster to read"
        )


def loader_speed(
    cfg: CfgNode, workers: Sequence[int], seconds: float, step_ms: float | None = None
) -> LoaderTable:
    """Measure the training loader of a config, as one rank runs it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a DataLoader worker
    cfg = cfg.clone()
    cfg.defrost()
    batch_size = max(cfg.TRAIN.BATCH_SIZE // max(cfg.NUM_GPUS, 1), 1)
    cfg.DATA_LOADER.NUM_WORKERS = 0
    # Training reads the timestamps of each video only once and caches them. The first profile
    # measures these reads. Later measurements use only videos whose timestamps are cached.
    loader = train_loader(cfg, batch_size=batch_size, raw=cfg.NUM_GPUS > 0)
    first = _profile(loader, batch_size, seconds)
    calls, demux = first.calls.get(_code_key(video.read_timestamps), (0, 0.0))
    known = _Subset(loader.dataset, sorted({index for _, index, *_ in first.keys}))
    stages = _stage_times(cfg, known, batch_size, seconds)
    rates = {}
    for count in workers:
        cfg.DATA_LOADER.NUM_WORKERS = count
        rates[count] = _clips_per_second(cfg, known, batch_size, seconds)
    torch.set_num_threads(threads)
    demux_ms = demux * 1000 / max(calls, 1)
    title = f"training loader of one process, batches of {batch_size}"
    return LoaderTable(title, rates, stages, batch_size, demux_ms, step_ms)


class _Subset(torch.utils.data.Dataset):
    """Some videos of a dataset, with new indices from 0."""

    def __init__(self, dataset: Any, videos: Sequence[int]) -> None:
        self._dataset, self._videos = dataset, videos

    def __len__(self) -> int:
        return len(self._videos)

    def __getitem__(self, key: tuple[int, ...]) -> Any:
        epoch, index, *repetition = key
        return self._dataset[(epoch, self._videos[index], *repetition)]


class _Profile(NamedTuple):
    keys: list[tuple[int, ...]]
    samples: list[Any]  # the last `batch_size` samples
    calls: dict[Any, tuple[int, float]]  # function -> number of calls, cumulative seconds


def _profile(loader: Any, batch_size: int, seconds: float) -> _Profile:
    """Load samples in the order of training, in this process, with a profiler."""
    profile, start = cProfile.Profile(), time.perf_counter()
    keys: list[tuple[int, ...]] = []
    samples: list[Any] = []
    while time.perf_counter() - start < seconds or len({key[1] for key in keys}) < batch_size:
        loader.batch_sampler.set_epoch(keys[-1][0] + 1 if keys else 0)
        for key in itertools.chain.from_iterable(loader.batch_sampler):
            sample = profile.runcall(loader.dataset.__getitem__, key)
            samples = [*samples, sample][-batch_size:]
            keys.append(key)
            if time.perf_counter() - start > seconds and len(keys) >= batch_size:
                break
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    calls = {name: (entry[1], entry[3]) for name, entry in stats.items()}
    return _Profile(keys, samples, calls)


def _stage_times(
    cfg: CfgNode, dataset: _Subset, batch_size: int, seconds: float
) -> dict[str, float]:
    loader = train_loader(cfg, batch_size=batch_size, dataset=dataset)
    keys, samples, calls = _profile(loader, batch_size, seconds)

    def spent(function: Callable[..., Any]) -> float:
        return calls.get(_code_key(function), (0, 0.0))[1] * 1000 / len(keys)

    stages = {name: sum(map(spent, functions)) for name, functions in STAGES.items()}
    stages["other"] = max(spent(VideoDataset.__getitem__) - sum(stages.values()), 0.0)
    batch = collate(samples)
    jobs: dict[str, Callable[[], Any]] = {"collate": lambda: collate(samples)}
    if cfg.DATA_LOADER.PIN_MEMORY and torch.cuda.is_available() and isinstance(batch, Batch):
        jobs["pin"] = lambda: [clip.pin_memory() for clip in batch.clips]
    times = best_times(jobs, repeats=5).items()
    return stages | {name: 1000 * seconds / len(samples) for name, seconds in times}


def _clips_per_second(cfg: CfgNode, dataset: _Subset, batch_size: int, seconds: float) -> float:
    """Measure clips per second after the first batch, to exclude the start of the workers."""
    loader: Any = train_loader(cfg, batch_size=batch_size, dataset=dataset)
    clips = epoch = 0
    start: float | None = None
    while True:
        loader.batch_sampler.set_epoch(epoch)
        epoch += 1
        for item in loader:
            if start is None:
                start = time.perf_counter()
                continue
            clips += len(item.labels)
            if time.perf_counter() - start >= seconds:
                return clips / (time.perf_counter() - start)


def _code_key(function: Callable[..., Any]) -> Any:
    code = function.__code__
    return code.co_filename, code.co_firstlineno, code.co_name
