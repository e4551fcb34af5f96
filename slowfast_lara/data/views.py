"""The views of a test: all clips and crops of a video from one decode."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data.decode import Choose, Frames, Place, read_all, read_span
from slowfast_lara.data.images import list_images, read_images
from slowfast_lara.data.sampling import clip_indices, clip_length, segment_view_indices
from slowfast_lara.data.transforms import Normalize, uniform_crop_offset, whole_frame
from slowfast_lara.errors import DecodeError


def load_views(path: str | os.PathLike[str], cfg: CfgNode) -> torch.Tensor:
    """float32 [clips * crops, 3, T, H, W], clip-major, normalised.

    Clips are spread as cfg.TEST.DATASET asks. `path` is a video; with Ssv2 also
    a folder of extracted frames.
    """
    path = os.fspath(path)
    segments = cfg.TEST.DATASET.capitalize() == "Ssv2"
    source = list_images(path) if segments and os.path.isdir(path) else path
    return views_of(source, cfg)


def views_of(source: str | list[str], cfg: CfgNode) -> torch.Tensor:
    """The views of a video file or of a list of frames."""
    choose = _segment_views if cfg.TEST.DATASET.capitalize() == "Ssv2" else _clip_views
    place = partial(whole_frame, short_side=cfg.DATA.TEST_CROP_SIZE)
    frames = read_source(source, partial(choose, cfg), place, cfg, whole=True)
    return _crop_and_normalize(frames, cfg)


def read_source(
    source: str | list[str], choose: Choose, place: Place, cfg: CfgNode, *, whole: bool
) -> Frames:
    """The chosen frames of a video file or of a list of frames.

    `whole`: chosen by the number of frames that really decode (see decode.py).
    """
    if not isinstance(source, str):
        return read_images(source, choose, place, cfg.DATA.TARGET_FPS)
    if "\0" in source:
        raise DecodeError(f"{source!r}: not a path")
    threads = 0 if cfg.DATA_LOADER.ENABLE_MULTI_THREAD_DECODE else 1
    read = read_all if whole else read_span
    return read(source, choose, place, default_fps=cfg.DATA.TARGET_FPS, threads=threads)


def _clip_views(cfg: CfgNode, video_frames: int, fps: float) -> np.ndarray:
    data, views = cfg.DATA, cfg.TEST.NUM_ENSEMBLE_VIEWS
    length = clip_length(data.NUM_FRAMES, data.SAMPLING_RATE, fps, data.TARGET_FPS)
    return np.stack(
        [clip_indices(video_frames, length, data.NUM_FRAMES, view, views) for view in range(views)]
    )


def _segment_views(cfg: CfgNode, video_frames: int, fps: float) -> np.ndarray:
    views = cfg.TEST.NUM_ENSEMBLE_VIEWS
    return np.stack(
        [
            segment_view_indices(video_frames, cfg.DATA.NUM_FRAMES, view, views)
            for view in range(views)
        ]
    )


def _crop_and_normalize(frames: Frames, cfg: CfgNode) -> torch.Tensor:
    data, size = cfg.DATA, cfg.DATA.TEST_CROP_SIZE
    positions = (1,) if cfg.TEST.NUM_SPATIAL_CROPS == 1 else (0, 1, 2)
    height, width = frames.pixels.shape[1:3]
    normalize = Normalize(data.MEAN, data.STD, data.REVERSE_INPUT_CHANNEL)
    clips, num_frames = frames.order.shape
    views = _memory.take((clips * len(positions), 3, num_frames, size, size))
    for clip_number, order in enumerate(frames.order):
        clip = frames.pixels[order]
        for number, position in enumerate(positions, start=clip_number * len(positions)):
            y, x = uniform_crop_offset(height, width, size, position)
            normalize(clip[:, y : y + size, x : x + size], out=views[number])
    return torch.from_numpy(views)


class _Memory:
    """Memory of earlier results that nobody holds any more.

    The views of a video are hundreds of megabytes. To get so much from the system
    takes as long as to fill it, and several times that on a virtual machine.
    """

    # While the caller works on one result, the next one is made.
    BLOCKS = 2

    def __init__(self) -> None:
        self._blocks = [np.empty(0, np.float32)] * self.BLOCKS
        # Weak references to the arrays lent out: alive as long as a tensor on them is.
        self._lent: list[Callable[[], np.ndarray | None]] = [lambda: None] * self.BLOCKS
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array that nobody else uses."""
        size = math.prod(shape)
        with self._lock:
            for number in range(self.BLOCKS):
                if self._lent[number]() is not None:
                    continue
                if self._blocks[number].size < size:
                    self._blocks[number] = np.empty(size, np.float32)
                array = self._blocks[number][:size].reshape(shape)
                self._lent[number] = weakref.ref(array)
                return array
        return np.empty(shape, np.float32)


_memory = _Memory()
