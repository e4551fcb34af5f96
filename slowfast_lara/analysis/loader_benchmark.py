"""How fast the training loader of a config reads, and where the time of a sample goes."""

from __future__ import annotations

import cProfile
import itertools
import math
import os
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data import decode, loader, packets, sources, transforms
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.loader import Batch, train_loader
from slowfast_lara.data.packet_index import PacketIndex
from slowfast_lara.data.rand_augment import RandAugment

# A batch is put together as often as it takes to tell its time.
_COLLATED = 5
# What is told of a sample: the functions in which each part of its time is spent.
STAGES: dict[str, Sequence[Callable[..., Any]]] = {
    "find the video in the index": [PacketIndex.find],
    "open the container": [decode.open_container],
    "read, seek and decode": [
        packets.stored_frames,
        decode.frames_among,
        decode.decoded_frames,
        sources.read_image,
    ],
    "convert to RGB": [decode.ToRgb.__call__],
    "crop and resize": [decode.KeptFrames.add],
    "flip, jitter, RandAugment": [
        transforms.random_flip,
        transforms.color_jitter,
        RandAugment.__call__,
    ],
    "normalise": [transforms.Normalize.__call__],
}


class Speed(NamedTuple):
    """Clips per second by number of workers, and milliseconds of a sample's stages."""

    rates: dict[int, float]
    stages: dict[str, float]
    batch: int
    scan: float = 0.0  # milliseconds of a video that is not in the index yet


def loader_speed(cfg: CfgNode, workers: Sequence[int], seconds: float) -> Speed:
    """Of one process of the training that the config describes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has
    cfg = cfg.clone()
    cfg.defrost()
    batch = max(cfg.TRAIN.BATCH_SIZE // max(cfg.NUM_GPUS, 1), 1)
    cfg.DATA_LOADER.NUM_WORKERS = 0
    reading = train_loader(cfg, batch_size=batch)
    dataset, scan = _known(reading, batch, seconds)
    stages = _stages(cfg, dataset, batch, seconds)
    rates = {}
    for count in workers:
        cfg.DATA_LOADER.NUM_WORKERS = count
        rates[count] = _rate(cfg, dataset, batch, seconds)
    torch.set_num_threads(threads)
    return Speed(rates, stages, batch, scan)


class _Some(torch.utils.data.Dataset):
    """Some videos of a dataset, under numbers of their own."""

    def __init__(self, dataset: Any, videos: Sequence[int]) -> None:
        self._dataset, self._videos = dataset, videos

    def __len__(self) -> int:
        return len(self._videos)

    def __getitem__(self, key: tuple[int, ...]) -> Any:
        epoch, video, *more = key
        return self._dataset[(epoch, self._videos[video], *more)]


def _known(reading: Any, batch: int, seconds: float) -> tuple[_Some, float]:
    """Videos that are in the index, after a while of reading, and the milliseconds of a scan.

    A training scans a video once, in its first epoch: that is not measured with the rest.
    """
    profile, start, videos = cProfile.Profile(), time.perf_counter(), set()
    for key in _keys(reading.batch_sampler):
        profile.enable()
        reading.dataset[key]
        profile.disable()
        videos.add(key[1])
        if time.perf_counter() - start > seconds and len(videos) >= batch:
            break
    calls, taken = _calls(profile).get(_name(decode.scanned), (0, 0.0))
    return _Some(reading.dataset, sorted(videos)), taken * 1000 / max(calls, 1)


def _rate(cfg: CfgNode, dataset: _Some, batch: int, seconds: float) -> float:
    """Clips per second once the workers are at work."""
    reading = train_loader(cfg, batch_size=batch, dataset=dataset)
    clips, start, epoch = 0, 0.0, 0
    while not start or time.perf_counter() - start < seconds:
        reading.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for item in reading:
            if start:
                clips += len(item.labels)
                if time.perf_counter() - start >= seconds:
                    break
            else:  # with the first batch, which the others have been prefetched behind
                start = time.perf_counter()
        epoch += 1
    return clips / (time.perf_counter() - start)


def _stages(cfg: CfgNode, dataset: _Some, batch: int, seconds: float) -> dict[str, float]:
    reading = train_loader(cfg, batch_size=batch, dataset=dataset)
    profile, start = cProfile.Profile(), time.perf_counter()
    samples: list[Any] = []
    for key in _keys(reading.batch_sampler):
        profile.enable()
        sample = dataset[key]
        profile.disable()
        samples.append(sample)
        if time.perf_counter() - start > seconds and len(samples) >= batch:
            break
        if len(samples) > batch:
            samples[-batch - 1] = None
    stages, samples = _by_function(profile, len(samples)), samples[-batch:]
    stages["put together"] = _milliseconds(lambda: loader.collate(samples)) / len(samples)
    if torch.cuda.is_available() and cfg.DATA_LOADER.PIN_MEMORY:
        clips = loader.collate(samples)
        if isinstance(clips, Batch) and clips.clips:
            stages["pin"] = _milliseconds(clips.clips[0].pin_memory) / len(samples)
    return stages


def _keys(batches: Any) -> Iterator[tuple[int, ...]]:
    """What a training reads, epoch after epoch."""
    for epoch in itertools.count():
        batches.set_epoch(epoch)
        for keys in batches:
            yield from keys


def _by_function(profile: cProfile.Profile, count: int) -> dict[str, float]:
    calls = _calls(profile)

    def spent(function: Callable[..., Any]) -> float:
        return calls.get(_name(function), (0, 0.0))[1] * 1000 / count

    stages = {name: sum(map(spent, functions)) for name, functions in STAGES.items()}
    whole = spent(VideoDataset.__getitem__)
    return {**stages, "the rest": max(whole - sum(stages.values()), 0.0)}


def _calls(profile: cProfile.Profile) -> dict[Any, tuple[int, float]]:
    """How often each function was called, and the seconds spent in it."""
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return {name: (entry[1], entry[3]) for name, entry in stats.items()}


def _name(function: Callable[..., Any]) -> Any:
    code = function.__code__
    return code.co_filename, code.co_firstlineno, code.co_name


def _milliseconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(_COLLATED):
        work()
    return (time.perf_counter() - start) * 1000 / _COLLATED


def as_text(speed: Speed, step_ms: float | None) -> str:
    total = sum(speed.stages.values())
    lines = [f"a training sample takes {total:.1f} ms of one core:"]
    lines += [
        f"  {name:<28} {ms:7.2f} ms {100 * ms / total:5.1f} %" for name, ms in speed.stages.items()
    ]
    if speed.scan:
        lines.append(f"a video that is new takes {speed.scan:.1f} ms more: it is scanned, once")
    lines.append(f"clips per second, by DATA_LOADER.NUM_WORKERS (batches of {speed.batch}):")
    lines += [
        f"  {count:>3}  {rate:8.1f}   keeps up with steps of {1000 * speed.batch / rate:.0f} ms"
        for count, rate in speed.rates.items()
    ]
    if step_ms is not None:
        lines.append(verdict(speed, step_ms, os.cpu_count() or 1))
    return "\n".join(lines)


def verdict(speed: Speed, step_ms: float, cores: int) -> str:
    """Whether the loader keeps up with training steps of this time."""
    needed = speed.batch * 1000 / step_ms
    said = f"steps of {step_ms:g} ms take {needed:.1f} clips per second"
    enough = [count for count, rate in speed.rates.items() if rate >= needed]
    if enough:
        return f"{said}: DATA_LOADER.NUM_WORKERS {min(enough)} is enough"
    busiest = max(speed.rates)
    each = speed.rates[busiest] / max(busiest, 1)
    workers = math.ceil(needed / each)
    if workers <= cores:
        return f"{said}: DATA_LOADER.NUM_WORKERS {workers} should do, by the rate of {busiest}"
    return (
        f"{said}: the data will be the bottleneck. About {workers} workers would be needed, and "
        f"there are {cores} cores; `slowfast-lara data prepare` makes videos quicker to read"
    )
