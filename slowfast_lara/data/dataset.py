"""Base class of the datasets: samples for training, views for testing.

A subclass implements the choice of frames as class methods, because `load_views` and streaming call
them without a dataset object.

The random generator of a sample is seeded by RNG_SEED, epoch, index and, with repeated
augmentation, the repetition. Samples therefore do not depend on the number of workers or on where a
run was resumed.

If a video does not decode, PySlowFast substitutes another one, even in tests. Here, only training
substitutes videos, and every failure is reported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data import transforms
from slowfast_lara.data.bad_videos import Failure
from slowfast_lara.data.lists import find_prefix, read_path_labels
from slowfast_lara.data.rand_augment import RandAugment
from slowfast_lara.data.regions import CropFn
from slowfast_lara.data.sources import FrameSource, VideoPath, read_frames
from slowfast_lara.data.string_array import StringArray
from slowfast_lara.data.timestamps import TimestampCache
from slowfast_lara.data.video import ClipFrames, FrameIndexFn
from slowfast_lara.data.views import crop_views
from slowfast_lara.errors import DataError, DecodeError, UserError, counted
from slowfast_lara.labels import Label, label_kind

MODES = ("train", "val", "test")
MAX_ATTEMPTS = 10  # maximum number of videos tried for one training sample
PATHS_CHECKED = 8  # maximum number of videos of a list whose existence the constructor checks


class Sample(NamedTuple):
    """Training or validation sample with the clip [3, T, H, W].

    If a validation video does not decode, `clip` is None; in training, another video replaces it.
    If `VideoDataset.raw` is set, the clip is uint8 [T, H, W, 3], RGB and not normalised.
    """

    clip: torch.Tensor | None
    label: Label | np.ndarray  # as `VideoDataset.target` returns it
    index: int  # type: ignore[assignment]  # shadows tuple.index
    failures: list[Failure]


class VideoViews(NamedTuple):
    """All views [clips * crops, 3, T, H, W] of a test video, or why it does not decode."""

    views: torch.Tensor | None
    label: Label
    index: int  # type: ignore[assignment]  # shadows tuple.index
    path: str
    error: str | None


class WorkerError(NamedTuple):
    """Error of a DataLoader worker, returned as an item so that the main process raises it.

    If the worker raised the error itself, PyTorch would add the worker's traceback to the message.
    """

    reason: str


class VideoDataset(torch.utils.data.Dataset):
    """Base class: videos with `paths` and `labels`; subclasses read lists and choose frames."""

    # Whether a mirrored video keeps its label.
    may_flip = True
    # Whether a folder of images is accepted as a video.
    frames_in_folders = False
    # Whether clips stay uint8 (a quarter of the bytes of float32) and are normalised on the device.
    raw = False
    # Config key of the folder that is prepended to relative paths; error messages name the key.
    prefix_key = "DATA.PATH_PREFIX"
    _frames: StringArray | None = None  # set by `use_frames`

    def __init__(self, cfg: CfgNode, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; must be one of {', '.join(MODES)}")
        self.cfg = cfg
        self.mode = mode
        paths, labels = self.read_lists()
        self._check_lists(paths, labels)
        self.paths: Sequence[str] = StringArray.of(paths)
        # Equal labels share one object: reference counting makes a forked worker copy the memory
        # page of every object that it uses.
        classes = {x: tuple(map(int, x)) if isinstance(x, tuple) else int(x) for x in labels}
        self.labels: list[Label] = [classes[label] for label in labels]
        self._check_paths()
        self._timestamps = TimestampCache(cfg.DATA.PATH_TO_DATA_DIR)
        self._normalize = transforms.Normalize(cfg.DATA)
        self._rand_augment = RandAugment(cfg.DATA.RAND_AUGMENT)

    def read_lists(self) -> tuple[list[str], list[Label]]:
        """Paths and labels of the videos of `self.mode`."""
        raise NotImplementedError

    def read_path_list(self, list_file: str) -> tuple[list[str], list[Label]]:
        """Paths and labels of a `path label` list."""
        data, num_classes = self.cfg.DATA, self.cfg.MODEL.NUM_CLASSES
        options = {"prefix": data.PATH_PREFIX, "several": data.MULTI_LABEL}
        return read_path_labels(list_file, data.PATH_LABEL_SEPARATOR, num_classes, **options)

    def use_frames(self, frames: StringArray, rows: list[int], list_file: str) -> list[str]:
        """Use extracted frames instead of video files; return the folder of each video.

        Video i has the paths `frames[rows[i]]`, one per line, relative to DATA.PATH_PREFIX.
        """
        # `_frame_rows` is a tensor, because workers share the memory of tensors.
        self._frames, self._frame_rows = frames, torch.tensor(rows)
        first_paths = [frames[row].partition("\n")[0] for row in rows]
        self._prefix = find_prefix(self.cfg.DATA.PATH_PREFIX, first_paths, list_file)
        return [os.path.join(self._prefix, os.path.dirname(path)) for path in first_paths]

    def list_or_val(self) -> str:
        """Path of the list of `self.mode`; a test uses val.csv if there is no test.csv."""
        folder = self.cfg.DATA.PATH_TO_DATA_DIR
        path = os.path.join(folder, f"{self.mode}.csv")
        is_missing = self.mode == "test" and not os.path.exists(path)
        return os.path.join(folder, "val.csv") if is_missing else path

    def target(self, index: int, draws: np.ndarray | None = None) -> Label | np.ndarray:
        """The result of `clip_label`; as a multi-hot vector if DATA.MULTI_LABEL is set."""
        label = self.clip_label(index, draws)
        if not self.cfg.DATA.MULTI_LABEL:
            return label
        classes = np.zeros(self.cfg.MODEL.NUM_CLASSES, np.int64)
        classes[list(cast(tuple[int, ...], label))] = 1
        return classes

    def clip_label(self, index: int, draws: np.ndarray | None) -> Label:
        """Label of the video, or of the clip that `clip_frames` chooses by `draws`.

        This base class always returns the label of the video. A dataset with labels per frame
        overrides this method.
        """
        return self.labels[index]

    def video_path(self, index: int) -> VideoPath:
        """Path of a video (a file or a folder of images), or paths of the images of its frames."""
        if self._frames is None:
            return self.paths[index]
        paths = self._frames[int(self._frame_rows[index])].split("\n")[:-1]
        return [os.path.join(self._prefix, path) for path in paths]

    @classmethod
    def clip_frames(
        cls, cfg: CfgNode, draws: np.ndarray | None, video_frames: int, fps: float
    ) -> np.ndarray:
        """Frame indices of a random clip, or of the central clip if `draws` is None.

        `draws` are NUM_FRAMES random numbers in [0, 1).
        """
        raise NotImplementedError

    @classmethod
    def view_frames(
        cls, cfg: CfgNode, view: int, num_views: int, video_frames: int, fps: float
    ) -> np.ndarray:
        """Frame indices of test clip number `view`; a video has `num_views` test clips."""
        raise NotImplementedError

    @classmethod
    def window_frames(cls, cfg: CfgNode, available: int, length: int) -> np.ndarray:
        """Frame indices in a window of `length` frames, of which `available` have been received."""
        raise NotImplementedError

    @classmethod
    def window_seconds(cls, cfg: CfgNode) -> float:
        """Default length of a streaming window, in seconds."""
        raise NotImplementedError

    @classmethod
    def read_views(cls, source: FrameSource, cfg: CfgNode) -> torch.Tensor:
        """Read all test views of a video: float32 [clips * crops, 3, T, H, W], clip-major."""
        views = cfg.TEST.NUM_ENSEMBLE_VIEWS

        def choose(video_frames: int, fps: float) -> np.ndarray:
            return np.stack(
                [cls.view_frames(cfg, view, views, video_frames, fps) for view in range(views)]
            )

        crop = partial(transforms.test_frame, data=cfg.DATA)
        return crop_views(cls._read(source, choose, crop, cfg), cfg)

    @classmethod
    def _read(
        cls,
        source: FrameSource,
        choose: FrameIndexFn,
        crop: CropFn,
        cfg: CfgNode,
        cache: TimestampCache | None = None,
    ) -> ClipFrames:
        """Read the chosen frames; without a `cache`, decode the whole video."""
        if not cls.frames_in_folders and isinstance(source, str) and os.path.isdir(source):
            raise DecodeError(f"{source}: is a folder; {cls.__name__} reads only video files")
        threads = 0 if cfg.DATA_LOADER.ENABLE_MULTI_THREAD_DECODE else 1
        options = {"default_fps": cfg.DATA.TARGET_FPS, "threads": threads}
        return read_frames(source, choose, crop, whole=cache is None, cache=cache, **options)

    def _check_lists(self, paths: list[str], labels: list[Label]) -> None:
        """Raise a DataError if `read_lists` of a user's class returned invalid paths or labels."""
        where = f"{type(self).__name__}.read_lists, {self.mode}"
        if not len(paths) == len(labels) > 0:
            counts = f"{len(paths)} paths and {len(labels)} labels"
            raise DataError(f"{where}: expected one or more paths with a label each; got {counts}")
        kind = label_kind(self.cfg)
        for label in labels:
            if not kind.has_label(label):
                raise DataError(f"{where}: label is {label!r:.80}; must be {kind.description}")

    def _check_paths(self) -> None:
        """Check up to PATHS_CHECKED videos, spread over the list; raise a DataError if none exists.

        Without this check, a wrong prefix would cause one failure per video during the run.
        """
        indices = np.unique(np.linspace(0, len(self) - 1, PATHS_CHECKED).astype(int)).tolist()
        paths = [self.video_path(index) for index in indices]
        files = [path if isinstance(path, str) else path[0] for path in paths]
        if not any(os.path.exists(file) for file in files):
            node, name = self.prefix_key.split(".")
            raise DataError(
                f"{self.prefix_key} is {self.cfg[node][name]!r}; with this prefix, none of the "
                f"{counted(len(files), 'video')} checked in the {self.mode} list exists; the first "
                f"is {files[0]}"
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: int | tuple[int, ...]) -> Sample | VideoViews:
        """Read an item; `key` is (epoch, index), (epoch, index, repetition), or index (epoch 0)."""
        epoch, index, *repetition = key if isinstance(key, tuple) else (0, key)
        if not 0 <= index < len(self):  # an IndexError ends `for` loops over the dataset
            raise IndexError(f"video index {index} is out of range for {len(self)} videos")
        if self.mode == "test":
            return self._test_views(index)
        if self.mode == "val":
            return self._val_sample(index)
        return self._train_sample(epoch, index, *repetition)

    def __getitems__(
        self, keys: list[int] | list[tuple[int, ...]]
    ) -> list[Sample | VideoViews | WorkerError]:
        """The items of a batch, or only a WorkerError if reading an item raises an error.

        The DataLoader calls this method, in a worker process if there are workers.
        """
        try:
            return [self[key] for key in keys]
        except (UserError, OSError, MemoryError) as error:
            return [WorkerError(f"{error}" or type(error).__name__)]

    def _test_views(self, index: int) -> VideoViews:
        views, error = None, None
        try:
            views = self.read_views(self.video_path(index), self.cfg)
        except DecodeError as failure:
            error = self._failure(index, failure).reason
        return VideoViews(views, self.labels[index], index, self.paths[index], error)

    def _val_sample(self, index: int) -> Sample:
        """The central crop of the central clip."""
        size = self.cfg.DATA.TRAIN_CROP_SIZE
        crop = partial(transforms.whole_frame, short_side=size)
        try:
            pixels = self._read_clip(index, None, crop)
        except DecodeError as error:
            return Sample(None, self.target(index), index, [self._failure(index, error)])
        clip = self._to_tensor(transforms.uniform_crop(pixels, size, 1))
        return Sample(clip, self.target(index), index, [])

    def _train_sample(self, epoch: int, index: int, *repetition: int) -> Sample:
        rng = np.random.default_rng((self.cfg.RNG_SEED, epoch, index, *repetition))
        failures: list[Failure] = []
        video = index
        for _ in range(MAX_ATTEMPTS):
            draws = rng.random(self.cfg.DATA.NUM_FRAMES)
            try:
                clip = self._random_clip(video, draws, rng)
            except DecodeError as error:
                failures.append(self._failure(video, error))
                video = int(rng.integers(len(self)))
            else:
                return Sample(clip, self.target(video, draws), index, failures)
        raise DataError(
            f"{MAX_ATTEMPTS} videos in a row do not decode: "
            + "; ".join(f"{failure.path}: {failure.reason}" for failure in failures)
        )

    def _failure(self, video: int, error: DecodeError) -> Failure:
        path = self.paths[video]
        return Failure(path, str(error).removeprefix(f"{path}: "))

    def _random_clip(self, video: int, draws: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
        data = self.cfg.DATA
        crop_options = {"size": data.TRAIN_CROP_SIZE, "seed": int(rng.integers(2**63))}
        if data.USE_RANDOM_RESIZE_CROPS:
            crop = partial(transforms.resized_crop, **crop_options)
        else:
            smallest, largest = data.TRAIN_JITTER_SCALES
            short_side = transforms.draw_short_side(rng, smallest, largest, data.INV_UNIFORM_SAMPLE)
            crop = partial(transforms.jittered_crop, short_side=short_side, **crop_options)
        clip = self._read_clip(video, draws, crop)
        if data.RANDOM_FLIP and self.may_flip:
            clip = transforms.random_flip(clip, rng)
        if data.COLORJITTER:
            clip = transforms.color_jitter(clip, rng)
        if data.USE_RAND_AUGMENT:
            clip = self._rand_augment(clip, rng)
        if data.GRAYSCALE:
            clip = transforms.random_gray(clip, rng)
        if data.GAUSSIAN:
            clip = transforms.random_blur(clip, rng)
        if data.RE_PROB:
            clip = transforms.random_erase(clip, rng, data.RE_PROB)
        return self._to_tensor(clip)

    def _to_tensor(self, clip: np.ndarray) -> torch.Tensor:
        if self.raw:
            return torch.from_numpy(np.ascontiguousarray(clip))
        return self._normalize(clip)

    def _read_clip(self, video: int, draws: np.ndarray | None, crop: CropFn) -> np.ndarray:
        choose = partial(self.clip_frames, self.cfg, draws)
        frames = self._read(self.video_path(video), choose, crop, self.cfg, self._timestamps)
        if len(frames.pixels) == len(frames.order):  # no frame is repeated, so no copy is needed
            return frames.pixels
        return frames.pixels[frames.order]
