"""A video of any length, in windows: scores as its frames come.

Frames are cut to the model's crop at once, and only those of the last window are
kept: memory depends on the window, not on the length of the video.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import cv2
import numpy as np
from av.video.reformatter import VideoReformatter
from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.data.decode import MAX_PIXELS, ONE_THREAD, Region, decoded_frames, opened
from slowfast_lara.data.images import list_images, read_images
from slowfast_lara.data.sampling import clip_indices, segment_indices
from slowfast_lara.data.transforms import Normalize, uniform_crop_offset, whole_frame
from slowfast_lara.engine.evaluate import score_views
from slowfast_lara.errors import DecodeError

# Something-Something takes its frames from all of a video, whose usual length is this.
SSV2_SECONDS = 4.0


class Window(NamedTuple):
    """Scores [classes] of the frames from `start` to `end`, in seconds."""

    start: float
    end: float
    scores: np.ndarray
    # False at the beginning, where fewer frames than a window have been seen.
    full: bool


@contextlib.contextmanager
def open_frames(path: str, cfg: CfgNode) -> Iterator[tuple[float, Iterator[np.ndarray]]]:
    """Frames per second, and the frames one by one (RGB), of a video or a folder of images."""
    if os.path.isdir(path):
        fps = float(cfg.DATA.TARGET_FPS)
        yield fps, (_read_image(image, fps) for image in list_images(path))
        return
    with opened(path, 1) as (container, stream):
        fps = float(stream.average_rate or cfg.DATA.TARGET_FPS)
        yield fps, _rgb_frames(path, container, stream)


def _rgb_frames(path: str, container, stream) -> Iterator[np.ndarray]:
    reformatter, seen = VideoReformatter(), False
    for frame in decoded_frames(container, stream):
        if frame.width * frame.height > MAX_PIXELS:
            raise DecodeError(f"{path}: frames of {frame.width}x{frame.height} are too large")
        seen = True
        yield reformatter.reformat(frame, format="rgb24", **ONE_THREAD).to_ndarray()
    if not seen:
        raise DecodeError(f"{path}: no frame decodes")


def _read_image(path: str, fps: float) -> np.ndarray:
    def as_it_is(height: int, width: int) -> Region:
        return Region(0, 0, height, width, height, width)

    return read_images([path], lambda frames, rate: np.zeros(1, int), as_it_is, fps).pixels[0]


def default_window(cfg: CfgNode) -> float:
    """The seconds that the model's clips span."""
    if _by_segments(cfg):
        return SSV2_SECONDS
    return cfg.DATA.NUM_FRAMES * cfg.DATA.SAMPLING_RATE / cfg.DATA.TARGET_FPS


def _by_segments(cfg: CfgNode) -> bool:
    return cfg.TEST.DATASET.capitalize() == "Ssv2"


class WindowScorer:
    """Takes frames one by one; every stride it scores the last window, centre crop."""

    def __init__(
        self, model: nn.Module, cfg: CfgNode, fps: float, window: float, stride: float
    ) -> None:
        self._model, self._cfg, self._fps = model, cfg, fps
        self._length, self._stride = max(1, round(window * fps)), max(1, round(stride * fps))
        self._recent: deque[np.ndarray] = deque(maxlen=self._length)
        self._count = 0
        data = cfg.DATA
        self._normalize = Normalize(data.MEAN, data.STD, data.REVERSE_INPUT_CHANNEL)

    def run(self, frames: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Window | None]]:
        """Each frame, with the window that ends with it, if one does.

        The last frame always ends a window, which counts as full: a video shorter
        than a window has no other.
        """
        before = None
        for image in frames:
            if before is not None:
                yield before, self._add(before)
            before = image
        if before is not None:
            window = self._add(before) or self._score()
            yield before, window._replace(full=True)

    def _add(self, image: np.ndarray) -> Window | None:
        self._recent.append(self._crop(image))
        self._count += 1
        # The first full window starts with the video; shorter ones come before it.
        beyond = self._count - self._length
        ends = beyond % self._stride if beyond >= 0 else self._count % self._stride
        return self._score() if ends == 0 else None

    def _crop(self, image: np.ndarray) -> np.ndarray:
        size = self._cfg.DATA.TEST_CROP_SIZE
        region = whole_frame(*image.shape[:2], short_side=size)
        scaled = cv2.resize(image, (region.out_width, region.out_height))  # bilinear, as in data
        y, x = uniform_crop_offset(*scaled.shape[:2], size, 1)
        return scaled[y : y + size, x : x + size].copy()  # not a view of the whole frame

    def _score(self) -> Window:
        seen, wanted = len(self._recent), self._cfg.DATA.NUM_FRAMES
        indices = (
            segment_indices(seen, wanted, 0.5)
            if _by_segments(self._cfg)
            else clip_indices(seen, self._length, wanted, 0, 1)
        )
        clip = self._normalize(np.stack([self._recent[index] for index in indices]))
        scores = score_views(self._model, clip[None], self._cfg).numpy()
        return Window(
            (self._count - seen) / self._fps, self._count / self._fps, scores, seen == self._length
        )
