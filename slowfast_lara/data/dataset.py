"""What the datasets share: samples for training, views for testing.

A dataset chooses the frames itself, by methods of its class: testing, `load_views` and
streaming ask the same ones.

Every random draw of a sample comes from (RNG_SEED, epoch, index), with repeated
augmentation also from which repetition it is, so that it is the same whatever the
number of workers, and after a resume. PySlowFast replaces
a video that will not decode in testing too, and so scores another video; here
it is replaced in training only, and reported everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data import transforms
from slowfast_lara.data.augment import random_blur, random_erase, random_grey
from slowfast_lara.data.bad_videos import Failure
from slowfast_lara.data.decode import Choose, Frames, Place
from slowfast_lara.data.packet_index import PacketIndex
from slowfast_lara.data.rand_augment import RandAugment
from slowfast_lara.data.sources import Files, Source, read_frames
from slowfast_lara.data.string_array import Texts
from slowfast_lara.data.views import crop_views
from slowfast_lara.errors import DataError, DecodeError, UserError

MODES = ("train", "val", "test")
MAX_ATTEMPTS = 10
# How many videos of a list are looked for before a run.
PATHS_CHECKED = 8


class Sample(NamedTuple):
    """A clip [3, T, H, W] for training or validation."""

    clip: torch.Tensor | None
    label: int
    index: int  # type: ignore[assignment]  # a field in place of tuple.index
    failures: list[Failure]


class VideoViews(NamedTuple):
    """All views [clips * crops, 3, T, H, W] of a video of the test, or why there are none."""

    views: torch.Tensor | None
    label: int
    index: int  # type: ignore[assignment]  # a field in place of tuple.index
    path: str
    error: str | None


class BrokenOff(NamedTuple):
    """Why a worker of a loader cannot go on, to be raised in the main process.

    PyTorch hands on an error of a worker with the traceback as its message.
    """

    reason: str


class VideoDataset(torch.utils.data.Dataset):
    """Videos `paths` with `labels`; a subclass reads the lists and chooses the frames."""

    # Whether a mirrored video keeps its label.
    may_flip = True
    # Whether a folder of images is a video.
    frames_in_folders = False

    def __init__(self, cfg: CfgNode, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}; allowed: {', '.join(MODES)}")
        self.cfg = cfg
        self.mode = mode
        paths, labels = self._read_lists()
        self.paths: Sequence[str] = Texts.of(paths)
        # One object for each class: a worker that counts references to them copies nothing else.
        classes = {label: label for label in labels}
        self.labels = [classes[label] for label in labels]
        self._check_paths()
        data = cfg.DATA
        self._index = PacketIndex(data.PATH_TO_DATA_DIR)
        self._normalize = transforms.Normalize(data.MEAN, data.STD, data.REVERSE_INPUT_CHANNEL)
        self._rand_augment = RandAugment(data.RAND_AUGMENT)

    def _read_lists(self) -> tuple[list[str], list[int]]:
        raise NotImplementedError

    @classmethod
    def clip_frames(
        cls, cfg: CfgNode, draws: np.ndarray | None, video_frames: int, fps: float
    ) -> np.ndarray:
        """The frames of a clip: random by `draws` (NUM_FRAMES of [0, 1)), or the central ones."""
        raise NotImplementedError

    @classmethod
    def view_frames(
        cls, cfg: CfgNode, view: int, num_views: int, video_frames: int, fps: float
    ) -> np.ndarray:
        """The frames of clip `view` of the `num_views` of a test."""
        raise NotImplementedError

    @classmethod
    def window_frames(cls, cfg: CfgNode, seen: int, length: int) -> np.ndarray:
        """The frames of a streaming window of `length`, of which `seen` frames have come."""
        raise NotImplementedError

    @classmethod
    def window_seconds(cls, cfg: CfgNode) -> float:
        """How long a streaming window is unless the user says."""
        raise NotImplementedError

    @classmethod
    def read_views(cls, source: Source, cfg: CfgNode) -> torch.Tensor:
        """All views of a test, float32 [clips * crops, 3, T, H, W], clip-major."""
        views = cfg.TEST.NUM_ENSEMBLE_VIEWS

        def choose(video_frames: int, fps: float) -> np.ndarray:
            return np.stack(
                [cls.view_frames(cfg, view, views, video_frames, fps) for view in range(views)]
            )

        place = partial(transforms.whole_frame, short_side=cfg.DATA.TEST_CROP_SIZE)
        return crop_views(cls._read(source, choose, place, cfg), cfg)

    @classmethod
    def _read(
        cls,
        source: Source,
        choose: Choose,
        place: Place,
        cfg: CfgNode,
        index: PacketIndex | None = None,
    ) -> Frames:
        """Without an `index`, all of a video is decoded: see `read_frames`."""
        if not cls.frames_in_folders and isinstance(source, str) and os.path.isdir(source):
            raise DecodeError(f"{source}: a folder; {cls.__name__} has video files")
        threads = 0 if cfg.DATA_LOADER.ENABLE_MULTI_THREAD_DECODE else 1
        options = {"default_fps": cfg.DATA.TARGET_FPS, "threads": threads}
        return read_frames(source, choose, place, whole=index is None, index=index, **options)

    def _source(self, index: int) -> Files:
        """The video file, or the files of its frames."""
        return self.paths[index]

    def _check_paths(self) -> None:
        """A DataError if of a few videos, from the first to the last, none is there.

        With a wrong prefix each video would fail by itself, long after the start.
        """
        some = np.unique(np.linspace(0, len(self) - 1, PATHS_CHECKED).astype(int)).tolist()
        sources = [self._source(index) for index in some]
        files = [source if isinstance(source, str) else source[0] for source in sources]
        if not any(os.path.exists(file) for file in files):
            raise DataError(
                f"DATA.PATH_PREFIX is {self.cfg.DATA.PATH_PREFIX!r}; none of {len(files)} videos "
                f"of the {self.mode} list was found with it, the first looked for is {files[0]}"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: int | tuple[int, ...]) -> Sample | VideoViews:
        """`key` is (epoch, index), (epoch, index, repetition) or, for epoch 0, index."""
        epoch, index, *repetition = key if isinstance(key, tuple) else (0, key)
        if not 0 <= index < len(self):  # this error also ends a `for` over the dataset
            raise IndexError(f"video {index} of {len(self)}")
        if self.mode == "test":
            return self._test_views(index)
        if self.mode == "val":
            return self._val_sample(index)
        return self._train_sample(epoch, index, *repetition)

    def __getitems__(
        self, keys: list[int] | list[tuple[int, ...]]
    ) -> list[Sample | VideoViews | BrokenOff]:
        """The items of a batch: what PyTorch's loaders call, in a worker if there are any."""
        try:
            return [self[key] for key in keys]
        except (UserError, OSError, MemoryError) as error:
            return [BrokenOff(f"{error}" or type(error).__name__)]

    def _test_views(self, index: int) -> VideoViews:
        views, error = None, None
        try:
            views = self.read_views(self._source(index), self.cfg)
        except DecodeError as failure:
            error = self._failure(index, failure).reason
        return VideoViews(views, self.labels[index], index, self.paths[index], error)

    def _val_sample(self, index: int) -> Sample:
        """The central clip and crop."""
        size = self.cfg.DATA.TRAIN_CROP_SIZE
        place = partial(transforms.whole_frame, short_side=size)
        try:
            pixels = self._read_clip(index, None, place)
        except DecodeError as error:
            return Sample(None, self.labels[index], index, [self._failure(index, error)])
        clip = self._normalize(transforms.uniform_crop(pixels, size, 1))
        return Sample(clip, self.labels[index], index, [])

    def _train_sample(self, epoch: int, index: int, *repetition: int) -> Sample:
        rng = np.random.default_rng((self.cfg.RNG_SEED, epoch, index, *repetition))
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
            smallest, largest = data.TRAIN_JITTER_SCALES
            short_side = transforms.draw_short_side(rng, smallest, largest, data.INV_UNIFORM_SAMPLE)
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
        if data.GRAYSCALE:
            clip = random_grey(clip, rng)
        if data.GAUSSIAN:
            clip = random_blur(clip, rng)
        if data.RE_PROB:
            clip = random_erase(clip, rng, data.RE_PROB)
        return self._normalize(clip)

    def _read_clip(self, video: int, draws: np.ndarray | None, place: Place) -> np.ndarray:
        choose = partial(self.clip_frames, self.cfg, draws)
        frames = self._read(self._source(video), choose, place, self.cfg, self._index)
        if len(frames.pixels) == len(frames.order):  # no frame twice: nothing to copy
            return frames.pixels
        return frames.pixels[frames.order]
