"""What Kinetics and Ssv2 share: samples for training, views for testing.

Every random draw of a sample comes from (RNG_SEED, epoch, index), so that it is
the same whatever the number of workers, and after a resume. PySlowFast replaces
a video that will not decode in testing too, and so scores another video; here
it is replaced in training only, and reported everywhere.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data import transforms
from slowfast_lara.data.bad_videos import Failure
from slowfast_lara.data.decode import Place
from slowfast_lara.data.rand_augment import RandAugment
from slowfast_lara.data.views import read_source, views_of
from slowfast_lara.errors import DataError, DecodeError

MODES = ("train", "val", "test")
MAX_ATTEMPTS = 10


class Sample(NamedTuple):
    """A clip [3, T, H, W] for training or validation."""

    clip: torch.Tensor | None
    label: int
    index: int
    failures: list[Failure]


class VideoViews(NamedTuple):
    """All views [clips * crops, 3, T, H, W] of a video of the test, or why there are none."""

    views: torch.Tensor | None
    label: int
    index: int
    path: str
    error: str | None


class VideoDataset(torch.utils.data.Dataset):
    """Videos `paths` with `labels`; a subclass fills them and chooses the frames."""

    # Whether a mirrored video keeps its label.
    may_flip = True

    def __init__(self, cfg: CfgNode, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}; allowed: {', '.join(MODES)}")
        self.cfg = cfg
        self.mode = mode
        self.paths, self.labels = self._read_lists()
        data = cfg.DATA
        self._normalize = transforms.Normalize(data.MEAN, data.STD, data.REVERSE_INPUT_CHANNEL)
        self._rand_augment = RandAugment(data.RAND_AUGMENT)

    def _read_lists(self) -> tuple[list[str], list[int]]:
        raise NotImplementedError

    def _choose(self, draws: np.ndarray | None, video_frames: int, fps: float) -> np.ndarray:
        """The frames of a clip: random by `draws` (NUM_FRAMES of [0, 1)), or the central ones."""
        raise NotImplementedError

    def _source(self, index: int) -> str | list[str]:
        """The video file, or the files of its frames."""
        return self.paths[index]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: int | tuple[int, int]) -> Sample | VideoViews:
        """`key` is (epoch, index) or, for epoch 0, index."""
        epoch, index = key if isinstance(key, tuple) else (0, key)
        if not 0 <= index < len(self):  # also ends iteration
            raise IndexError(f"video {index} of {len(self)}")
        if self.mode == "test":
            return self._test_views(index)
        if self.mode == "val":
            return self._val_sample(index)
        return self._train_sample(epoch, index)

    def _test_views(self, index: int) -> VideoViews:
        views, error = None, None
        try:
            views = views_of(self._source(index), self.cfg)
        except DecodeError as failure:
            error = self._failure(index, failure).reason
        return VideoViews(views, self.labels[index], index, self.paths[index], error)

    def _val_sample(self, index: int) -> Sample:
        """The central clip and crop."""
        size = self.cfg.DATA.TRAIN_CROP_SIZE
        place = partial(transforms.whole_frame, short_side=size)
        try:
            clip = self._read_clip(index, None, place)
        except DecodeError as error:
            return Sample(None, self.labels[index], index, [self._failure(index, error)])
        y, x = transforms.uniform_crop_offset(*clip.shape[1:3], size, 1)
        clip = self._normalize(clip[:, y : y + size, x : x + size])
        return Sample(clip, self.labels[index], index, [])

    def _train_sample(self, epoch: int, index: int) -> Sample:
        rng = np.random.default_rng((self.cfg.RNG_SEED, epoch, index))
        failures: list[Failure] = []
        video = index
        for _ in range(MAX_ATTEMPTS):
            try:
                clip = self._random_clip(video, rng)
            except DecodeError as error:
                failures.append(self._failure(video, error))
                video = int(rng.integers(len(self)))
            else:
                return Sample(clip, self.labels[video], index, failures)
        raise DataError(
            f"{MAX_ATTEMPTS} videos in a row would not decode: "
            + "; ".join(f"{failure.path}: {failure.reason}" for failure in failures)
        )

    def _failure(self, video: int, error: DecodeError) -> Failure:
        path = self.paths[video]
        return Failure(path, str(error).removeprefix(f"{path}: "))

    def _random_clip(self, video: int, rng: np.random.Generator) -> torch.Tensor:
        data = self.cfg.DATA
        draws = rng.random(data.NUM_FRAMES)
        seed = int(rng.integers(2**63))
        if data.USE_RANDOM_RESIZE_CROPS:
            place = partial(transforms.resized_crop, size=data.TRAIN_CROP_SIZE, seed=seed)
        else:
            short_side = transforms.draw_short_side(
                rng, *data.TRAIN_JITTER_SCALES, data.INV_UNIFORM_SAMPLE
            )
            place = partial(
                transforms.jittered_crop,
                size=data.TRAIN_CROP_SIZE,
                short_side=short_side,
                seed=seed,
            )
        clip = self._read_clip(video, draws, place)
        if data.RANDOM_FLIP and self.may_flip:
            clip = transforms.random_flip(clip, rng)
        if data.COLORJITTER:
            clip = transforms.color_jitter(clip, rng)
        if data.USE_RAND_AUGMENT:
            clip = self._rand_augment(clip, rng)
        return self._normalize(clip)

    def _read_clip(self, video: int, draws: np.ndarray | None, place: Place) -> np.ndarray:
        choose = partial(self._choose, draws)
        frames = read_source(self._source(video), choose, place, self.cfg, whole=False)
        if len(frames.pixels) == len(frames.order):  # no frame twice: nothing to copy
            return frames.pixels
        return frames.pixels[frames.order]
