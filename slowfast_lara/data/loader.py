"""Loaders: which process sees which videos, and in which order."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from slowfast_lara.data.bad_videos import Failure
from slowfast_lara.data.dataset import BrokenOff, Sample, VideoViews
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.errors import DataError, RunError, first_line, no_shared_memory

T = TypeVar("T")

# How often a video comes in an epoch with repeated augmentation, as in Motionformer and DeiT.
REPETITIONS = 3

# One that could not be made, for lack of shared memory, prints a traceback when it goes: PyTorch
# asks it whether it was shut down, which is known only once it is made.
_MultiProcessingDataLoaderIter._shutdown = True


class Batch(NamedTuple):
    """Clips as PySlowFast's list of pathways: one tensor [B, 3, T, H, W], or none if B is 0."""

    clips: list[torch.Tensor]
    labels: torch.Tensor
    indices: torch.Tensor
    failures: list[Failure]


class TrainBatches:
    """Batches of (epoch, index): every process takes its slice of the same global batches.

    PySlowFast shuffles by process only if NUM_GPUS > 1: on several nodes with one
    GPU each, all would train on the same order.

    With `repeated` augmentation they are (epoch, index, repetition), the repetitions of a video
    one after the other (Hoffer et al. 2020, "Augment your batch"), and an epoch ends after as many
    clips as there are videos: other epochs have the videos that were left out.
    """

    def __init__(
        self,
        num_videos: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        repeated: bool = False,
    ) -> None:
        self._num_videos, self._repeated = num_videos, repeated
        self._batch_size = batch_size
        self._rank = rank
        self._global_batch = batch_size * world_size
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Which epoch comes next, and from which of its batches on (after a resume)."""
        self._epoch = epoch
        self._first_batch = first_batch

    def __len__(self) -> int:
        return self._num_videos // self._global_batch

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        epoch, first_batch = self._epoch, self._first_batch
        order = np.random.default_rng((self._seed, epoch)).permutation(self._num_videos)
        for batch in range(first_batch, len(self)):
            start = batch * self._global_batch + self._rank * self._batch_size
            places = range(start, start + self._batch_size)
            if self._repeated:
                repeated = (divmod(place, REPETITIONS) for place in places)
                yield [(epoch, int(order[video]), number) for video, number in repeated]
            else:
                yield [(epoch, int(order[place])) for place in places]


class TestVideos:
    """The videos of a test that are one process's: every video in one process."""

    def __init__(self, num_videos: int, rank: int, world_size: int) -> None:
        self._num_videos, self._rank, self._world_size = num_videos, rank, world_size
        self.leave_out(set())

    def leave_out(self, done: set[int]) -> None:
        """Share out the other videos only, because these are scored already."""
        left = [index for index in range(self._num_videos) if index not in done]
        self._mine = left[self._rank :: self._world_size]

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)


def train_loader(
    cfg: CfgNode, *, batch_size: int, rank: int = 0, world_size: int = 1, dataset: Any = None
) -> DataLoader:
    """Yields Batch, of the config's training list or of another dataset.

    Call `loader.batch_sampler.set_epoch` before each epoch.
    """
    dataset = dataset or dataset_class(cfg, "TRAIN")(cfg, "train")
    if len(dataset) < batch_size * world_size:
        raise DataError(
            f"the training list has {len(dataset)} videos, fewer than one batch of "
            f"{batch_size * world_size} (TRAIN.BATCH_SIZE times NUM_SHARDS)"
        )
    place = (batch_size, rank, world_size, cfg.RNG_SEED)
    batches = TrainBatches(len(dataset), *place, repeated=cfg.DATA.USE_REPEATED_AUG)
    return _loader(cfg, dataset, batch_sampler=batches, collate_fn=collate)


def val_loader(cfg: CfgNode, *, batch_size: int, rank: int = 0, world_size: int = 1) -> DataLoader:
    """Yields Batch; every video once over all processes, nothing padded."""
    dataset = dataset_class(cfg, "TRAIN")(cfg, "val")
    return _loader(
        cfg,
        dataset,
        sampler=range(rank, len(dataset), world_size),
        batch_size=batch_size,
        collate_fn=collate,
    )


def test_loader(cfg: CfgNode, *, rank: int = 0, world_size: int = 1) -> DataLoader:
    """Yields VideoViews. Call `loader.sampler.leave_out` if some are scored already."""
    dataset = dataset_class(cfg, "TEST")(cfg, "test")
    # All views of a video are hundreds of megabytes: a worker has one waiting, not two.
    prefetch = {"prefetch_factor": 1} if cfg.DATA_LOADER.NUM_WORKERS else {}
    return _loader(
        cfg,
        dataset,
        sampler=TestVideos(len(dataset), rank, world_size),
        batch_size=1,
        collate_fn=_only_one,
        **prefetch,
    )


class VideoLoader(DataLoader):
    """A loader that raises what ends its workers in one line, where a batch is asked for.

    PyTorch would also raise the death of a worker from a signal handler, wherever the main
    thread is: the log would print it and forget it, who writes a file would take it for an
    error of the disk, and another worker that is just handing over a batch would print a
    traceback. A loader that waits looks after its workers every five seconds anyway.
    """

    # Its workers, which stay from epoch to epoch.
    _processes: Sequence[BaseProcess] = ()

    # PyTorch's types expect its own class of iterators, which nothing here needs.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        others = multiprocessing.active_children()
        try:
            with _handler_of_children_kept():
                items = super().__iter__()
            started = [one for one in multiprocessing.active_children() if one not in others]
            self._processes = self._processes or started
            for item in items:
                if isinstance(item, BrokenOff):
                    raise RunError(item.reason)
                yield item
        # What PyTorch says, or a connection over which the worker was handing over a batch.
        except (RuntimeError, OSError, EOFError) as error:
            gone = _why_gone(self._processes, first_line(error))
            if not gone:
                raise
            raise RunError(gone) from None


@contextlib.contextmanager
def _handler_of_children_kept() -> Iterator[None]:
    """PyTorch sets its own as it starts workers; Windows has no such signal."""
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


def _why_gone(workers: Sequence[BaseProcess], said: str) -> str:
    """Why a worker of a loader is gone, and what to do about it; "" if none is.

    The connections of a process are closed a moment before it is known to have ended.
    """
    ended = wait([worker.sentinel for worker in workers], timeout=1)
    for worker in workers:
        worker.join(timeout=1 if worker.sentinel in ended else 0)
    codes = {worker.exitcode for worker in workers} - {None}
    # Windows has neither signal; no process ends with the code -inf.
    if -getattr(signal, "SIGBUS", math.inf) in codes:
        return no_shared_memory(said)
    # One that died as soon as it was started is known to PyTorch alone.
    killed = -getattr(signal, "SIGKILL", math.inf) in codes
    if killed or (not codes and said.startswith("DataLoader worker (pid")):
        return (
            f"a worker of the loader was killed, as the system does when memory runs out: lower "
            f"DATA_LOADER.NUM_WORKERS, TRAIN.BATCH_SIZE or, in a test, TEST.NUM_ENSEMBLE_VIEWS "
            f"({said})"
        )
    return f"a worker of the loader is gone: {said}" if codes else ""


def _loader(cfg: CfgNode, dataset: torch.utils.data.Dataset, **options) -> VideoLoader:
    workers = cfg.DATA_LOADER.NUM_WORKERS
    return VideoLoader(
        dataset,
        num_workers=workers,
        pin_memory=cfg.DATA_LOADER.PIN_MEMORY and torch.cuda.is_available(),
        persistent_workers=workers > 0,
        **options,
    )


def _only_one(videos: list[VideoViews | BrokenOff]) -> VideoViews | BrokenOff:
    (video,) = videos
    return _shared(video, [video.views] if isinstance(video, VideoViews) else [])


def collate(samples: list[Sample | BrokenOff]) -> Batch | BrokenOff:
    if isinstance(samples[0], BrokenOff):  # then it is the only one
        return samples[0]
    whole = [sample for sample in samples if isinstance(sample, Sample)]
    good = [sample for sample in whole if sample.clip is not None]
    try:
        clips = stacked([sample.clip for sample in good if sample.clip is not None])
    except (RuntimeError, OSError) as error:
        return BrokenOff(no_shared_memory(first_line(error)))
    batch = Batch(
        [clips] if len(clips) else [],
        torch.tensor([sample.label for sample in good], dtype=torch.int64),
        torch.tensor([sample.index for sample in good], dtype=torch.int64),
        [failure for sample in whole for failure in sample.failures],
    )
    return _shared(batch, [*batch.clips, batch.labels, batch.indices])


def stacked(clips: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all clips; in a worker, put together where the main process will see it."""
    if not clips:
        return torch.empty(0)
    if torch.utils.data.get_worker_info() is None:
        return torch.stack(clips)
    size = len(clips) * clips[0].nbytes
    # A stack of its own, to be copied there, would cost as much again.
    memory = torch.UntypedStorage._new_shared(size)
    out = torch.empty(0, dtype=clips[0].dtype).set_(memory)
    return torch.stack(clips, out=out.view(len(clips), *clips[0].shape))


def _shared(item: T, tensors: list[torch.Tensor | None]) -> T | BrokenOff:
    """In a worker, `item` with its tensors in shared memory, for the way to the main process.

    PyTorch would move them there in a thread, where an error only loses the item: the
    main process would wait for it forever.
    """
    if torch.utils.data.get_worker_info() is not None:
        try:
            for tensor in tensors:
                if tensor is not None:
                    tensor.share_memory_()
        except (RuntimeError, OSError) as error:
            return BrokenOff(no_shared_memory(first_line(error)))
    return item
