"""Loaders: which process sees which videos, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch.utils.data import DataLoader

from slowfast_lara.data.bad_videos import Failure
from slowfast_lara.data.dataset import Sample, VideoViews
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.errors import DataError


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
    """

    def __init__(
        self, num_videos: int, batch_size: int, rank: int, world_size: int, seed: int
    ) -> None:
        self._num_videos = num_videos
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

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, first_batch = self._epoch, self._first_batch
        order = np.random.default_rng((self._seed, epoch)).permutation(self._num_videos)
        for batch in range(first_batch, len(self)):
            start = batch * self._global_batch + self._rank * self._batch_size
            yield [(epoch, int(index)) for index in order[start : start + self._batch_size]]


def train_loader(
    cfg: CfgNode, *, batch_size: int, rank: int = 0, world_size: int = 1
) -> DataLoader:
    """Yields Batch. Call `loader.batch_sampler.set_epoch` before each epoch."""
    dataset = dataset_class(cfg, "TRAIN")(cfg, "train")
    if len(dataset) < batch_size * world_size:
        raise DataError(
            f"the training list has {len(dataset)} videos, fewer than one batch of "
            f"{batch_size * world_size} (TRAIN.BATCH_SIZE times NUM_SHARDS)"
        )
    batches = TrainBatches(len(dataset), batch_size, rank, world_size, cfg.RNG_SEED)
    return _loader(cfg, dataset, batch_sampler=batches, collate_fn=_collate)


def val_loader(cfg: CfgNode, *, batch_size: int, rank: int = 0, world_size: int = 1) -> DataLoader:
    """Yields Batch; every video once over all processes, nothing padded."""
    dataset = dataset_class(cfg, "TRAIN")(cfg, "val")
    return _loader(
        cfg,
        dataset,
        sampler=range(rank, len(dataset), world_size),
        batch_size=batch_size,
        collate_fn=_collate,
    )


def test_loader(cfg: CfgNode, *, rank: int = 0, world_size: int = 1) -> DataLoader:
    """Yields the VideoViews of one video after the other; every video in one process."""
    dataset = dataset_class(cfg, "TEST")(cfg, "test")
    # All views of a video are hundreds of megabytes: a worker has one waiting, not two.
    prefetch = {"prefetch_factor": 1} if cfg.DATA_LOADER.NUM_WORKERS else {}
    return _loader(
        cfg,
        dataset,
        sampler=range(rank, len(dataset), world_size),
        batch_size=None,
        collate_fn=_as_it_is,
        **prefetch,
    )


def _loader(cfg: CfgNode, dataset: torch.utils.data.Dataset, **options) -> DataLoader:
    workers = cfg.DATA_LOADER.NUM_WORKERS
    return DataLoader(
        dataset,
        num_workers=workers,
        pin_memory=cfg.DATA_LOADER.PIN_MEMORY and torch.cuda.is_available(),
        persistent_workers=workers > 0,
        **options,
    )


def _as_it_is(views: VideoViews) -> VideoViews:
    return views


def _collate(samples: list[Sample]) -> Batch:
    good = [sample for sample in samples if sample.clip is not None]
    clips = [sample.clip for sample in good if sample.clip is not None]
    return Batch(
        [torch.stack(clips)] if clips else [],
        torch.tensor([sample.label for sample in good], dtype=torch.int64),
        torch.tensor([sample.index for sample in good], dtype=torch.int64),
        [failure for sample in samples for failure in sample.failures],
    )
