"""DataLoaders for training, validation and testing; samplers that split videos among ranks."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from slowfast_lara.data.bad_videos import Failure
from slowfast_lara.data.dataset import Sample, VideoViews, WorkerError
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.errors import DataError, RunError, counted, first_line, no_shared_memory

T = TypeVar("T")

# Clips per video and epoch with repeated augmentation, as in Motionformer and DeiT.
REPETITIONS = 3


class Batch(NamedTuple):
    """Samples that decode, collated, and the failures of all samples.

    `clips` is a list, as in PySlowFast: one tensor [B, 3, T, H, W], or empty if B is 0. If
    `VideoDataset.raw` is set, the tensor is uint8 [B, T, H, W, 3], not normalised.
    """

    clips: list[torch.Tensor]
    labels: torch.Tensor
    indices: torch.Tensor
    failures: list[Failure]


@dataclass(eq=False)
class TrainBatches:
    """Batch sampler of dataset keys (epoch, index); each rank takes its slice of a global batch.

    In PySlowFast, ranks split batches only if NUM_GPUS > 1: on several nodes with one GPU each, all
    ranks train on the same videos.

    With `repeated` augmentation, the keys are (epoch, index, repetition), and the repetitions of a
    video are consecutive (Hoffer et al. 2020, "Augment your batch"). An epoch has as many clips as
    without repetitions, so it covers only about 1 / REPETITIONS of the videos, chosen at random.
    """

    num_videos: int
    batch_size: int  # clips per rank
    rank: int
    world_size: int
    seed: int
    repeated: bool

    def __post_init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Select the next epoch, and its first batch (above 0 if a run resumes within an epoch)."""
        self._epoch, self._first_batch = epoch, first_batch

    def __len__(self) -> int:
        return self.num_videos // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[tuple[int, ...]]]:
        epoch, first_batch = self._epoch, self._first_batch
        order = np.random.default_rng((self.seed, epoch)).permutation(self.num_videos)
        for batch in range(first_batch, len(self)):
            start = (batch * self.world_size + self.rank) * self.batch_size
            positions = range(start, start + self.batch_size)
            if self.repeated:
                repeated = (divmod(position, REPETITIONS) for position in positions)
                yield [(epoch, int(order[video]), number) for video, number in repeated]
            else:
                yield [(epoch, int(order[position])) for position in positions]


class TestVideos:
    """Test sampler that assigns each video to one rank."""

    def __init__(self, num_videos: int, rank: int, world_size: int) -> None:
        self._num_videos, self._rank, self._world_size = num_videos, rank, world_size
        self.leave_out(set())

    def leave_out(self, done: set[int]) -> None:
        """Omit videos that already have scores; distribute the others over the ranks."""
        left = [index for index in range(self._num_videos) if index not in done]
        self._indices = left[self._rank :: self._world_size]

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


def train_loader(
    cfg: CfgNode,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    dataset: Any = None,
    raw: bool = False,
) -> DataLoader:
    """Loader of `Batch` objects from `dataset`, by default the config's training list.

    Call `loader.batch_sampler.set_epoch` before each epoch.
    """
    if dataset is None:
        dataset = dataset_class(cfg, "TRAIN")(cfg, "train")
        dataset.raw = raw
    if len(dataset) < batch_size * world_size:
        raise DataError(
            f"the training list has {counted(len(dataset), 'video')}, fewer than one batch of "
            f"{batch_size * world_size} (TRAIN.BATCH_SIZE times NUM_SHARDS); use a smaller "
            "TRAIN.BATCH_SIZE"
        )
    seed, repeated = cfg.RNG_SEED, cfg.DATA.USE_REPEATED_AUG
    batches = TrainBatches(len(dataset), batch_size, rank, world_size, seed, repeated)
    return _loader(cfg, dataset, batch_sampler=batches, collate_fn=collate)


def val_loader(
    cfg: CfgNode, *, batch_size: int, rank: int = 0, world_size: int = 1, raw: bool = False
) -> DataLoader:
    """Validation loader of `Batch` objects; each video is read by one rank, without padding."""
    dataset = dataset_class(cfg, "TRAIN")(cfg, "val")
    dataset.raw = raw
    videos = range(rank, len(dataset), world_size)
    return _loader(cfg, dataset, sampler=videos, batch_size=batch_size, collate_fn=collate)


def test_loader(cfg: CfgNode, *, rank: int = 0, world_size: int = 1) -> DataLoader:
    """Test loader of `VideoViews`; `loader.sampler.leave_out` omits videos already scored."""
    dataset = dataset_class(cfg, "TEST")(cfg, "test")
    videos = TestVideos(len(dataset), rank, world_size)
    # The views of a video take hundreds of megabytes: prefetch one video per worker, not two.
    prefetch = {"prefetch_factor": 1} if cfg.DATA_LOADER.NUM_WORKERS else {}
    options: dict[str, Any] = {"batch_size": 1, "collate_fn": _collate_one, **prefetch}
    # Views are copied to the GPU in parts, synchronously: pinning would only lock memory.
    return _loader(cfg, dataset, sampler=videos, pin_memory=False, **options)


def _disable_opencv_threads(worker: int | None = None) -> None:
    """Disable OpenCV's threads: the workers already use all cores.

    The main process calls this before workers fork: in a forked process, `cv2.setNumThreads` waits
    forever for threads that only the parent has. Spawned workers call it too, when they start.
    """
    if cv2.getNumThreads() != 1:
        cv2.setNumThreads(0)


def _loader(
    cfg: CfgNode, dataset: torch.utils.data.Dataset, pin_memory: bool = True, **options
) -> VideoLoader:
    workers = cfg.DATA_LOADER.NUM_WORKERS
    _disable_opencv_threads()
    # The destructor of PyTorch's iterator reads `_shutdown`. If the constructor fails for lack of
    # shared memory, it may not have set `_shutdown`: without this default, a traceback is printed.
    _MultiProcessingDataLoaderIter._shutdown = True
    return VideoLoader(
        dataset,
        num_workers=workers,
        pin_memory=pin_memory and cfg.DATA_LOADER.PIN_MEMORY and torch.cuda.is_available(),
        persistent_workers=workers > 0,
        worker_init_fn=_disable_opencv_threads,
        **options,
    )


class VideoLoader(DataLoader):
    """A DataLoader whose iterator raises a one-line RunError for a WorkerError or a dead worker.

    PyTorch also raises an error from a SIGCHLD handler, at any point of the main thread. Inside
    logging, that error would be printed and dropped; inside a file write, it would look like a disk
    error. This class removes that handler, which is not needed: an iterator that waits for a batch
    checks its workers every five seconds.
    """

    # PyTorch declares its own iterator class as return type; callers need only an Iterator.
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            with _preserved_sigchld_handler():
                items = super().__iter__()
            for item in items:
                if isinstance(item, WorkerError):
                    raise RunError(item.reason)
                yield item
        # PyTorch or the connection to a worker raises one of these types if the worker dies.
        except (RuntimeError, OSError, EOFError) as error:
            workers = getattr(self._iterator, "_workers", ())
            reason = _death_reason(workers, first_line(error))
            if not reason:
                raise
            raise RunError(reason) from None


@contextlib.contextmanager
def _preserved_sigchld_handler() -> Iterator[None]:
    """Context manager: restore the SIGCHLD handler that PyTorch replaces; no effect on Windows."""
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


def _death_reason(workers: Sequence[BaseProcess], message: str) -> str:
    """Why a worker died and what to change, as an error message; "" if no worker died.

    Waits for exit codes, because a dying process closes its connections a moment before it ends.
    """
    ended = wait([worker.sentinel for worker in workers], timeout=1)
    for worker in workers:
        worker.join(timeout=1 if worker.sentinel in ended else 0)
    codes = {worker.exitcode for worker in workers} - {None}
    # Windows has neither SIGBUS nor SIGKILL; infinity never equals an exit code.
    if -getattr(signal, "SIGBUS", math.inf) in codes:
        return no_shared_memory(message)
    # A worker that died during its start is not in `workers`; PyTorch's message reports it.
    killed = -getattr(signal, "SIGKILL", math.inf) in codes
    if killed or (not codes and message.startswith("DataLoader worker (pid")):
        return (
            f"a DataLoader worker was killed, probably because memory ran out: lower "
            f"DATA_LOADER.NUM_WORKERS, TRAIN.BATCH_SIZE or, in a test, TEST.NUM_ENSEMBLE_VIEWS "
            f"({message})"
        )
    return f"a DataLoader worker died: {message}" if codes else ""


def _collate_one(videos: list[VideoViews | WorkerError]) -> VideoViews | WorkerError:
    (video,) = videos
    return _to_shared_memory(video, [video.views] if isinstance(video, VideoViews) else [])


def collate(samples: list[Sample | WorkerError]) -> Batch | WorkerError:
    if isinstance(samples[0], WorkerError):  # always the only item of `samples`
        return samples[0]
    read = [sample for sample in samples if isinstance(sample, Sample)]
    good = [sample for sample in read if sample.clip is not None]
    try:  # in a worker, default_collate stacks directly in shared memory, which saves a copy
        clips = [default_collate([sample.clip for sample in good])] if good else []
    except (RuntimeError, OSError) as error:
        return WorkerError(no_shared_memory(first_line(error)))
    batch = Batch(
        clips,
        torch.tensor(np.array([sample.label for sample in good], np.int64)),
        torch.tensor([sample.index for sample in good], dtype=torch.int64),
        [failure for sample in read for failure in sample.failures],
    )
    return _to_shared_memory(batch, [*batch.clips, batch.labels, batch.indices])


def _to_shared_memory(item: T, tensors: list[torch.Tensor | None]) -> T | WorkerError:
    """In a worker, move the tensors of `item` to shared memory; return `item` or a WorkerError.

    Otherwise PyTorch would move them in a background thread. After an error in that thread, the
    main process would wait for the item forever.
    """
    if torch.utils.data.get_worker_info() is not None:
        try:
            for tensor in tensors:
                if tensor is not None:
                    tensor.share_memory_()
        except (RuntimeError, OSError) as error:
            return WorkerError(no_shared_memory(first_line(error)))
    return item
