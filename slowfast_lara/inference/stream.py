"""Sliding windows over a video of any length.

Frames are cropped on arrival and only those of the last window are kept, so memory does not
depend on the length of the video.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import cv2
import numpy as np
from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.transforms import Normalize, uniform_crop, whole_frame
from slowfast_lara.errors import DecodeError
from slowfast_lara.inference.prediction import Ranking, format_ranking, top_classes
from slowfast_lara.inference.scoring import score_views


class Window(NamedTuple):
    """The prediction for one window of a stream.

    Attributes:
        start: seconds from the start of the video.
        end: seconds from the start of the video.
        scores: float32 [classes], softmax scores.
        full: False if the window is cut off by the start of the video.
        names: a name for each class.
    """

    start: float
    end: float
    scores: np.ndarray
    full: bool
    names: Sequence[str] = ()

    def top(self, count: int = 5) -> Ranking:
        """The `count` classes with the highest scores: their numbers, names and scores."""
        return top_classes(self.scores, self.names, count)

    def __repr__(self) -> str:
        best = format_ranking(self.top()) if self.names else f"{len(self.scores)} scores"
        return f"{self.start:.2f} to {self.end:.2f} s: {best}"


class WindowScorer:
    """Scores the last window of frames, centre crop, once per stride.

    `window` and `stride` are in seconds; default: the time span of a clip, and half a window.
    """

    def __init__(
        self,
        model: nn.Module,
        cfg: CfgNode,
        fps: float,
        window: float | None = None,
        stride: float | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._model, self._cfg, self._fps, self._names = model, cfg, fps, names
        window = window or dataset_class(cfg, "TEST").window_seconds(cfg)
        stride = stride or window / 2
        self._length, self._stride = max(1, round(window * fps)), max(1, round(stride * fps))
        self._recent: deque[np.ndarray] = deque(maxlen=self._length)
        self._count = 0
        data = cfg.DATA
        self._normalize = Normalize(data.MEAN, data.STD, data.REVERSE_INPUT_CHANNEL)

    def run(self, frames: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray, Window | None]]:
        """Yield each frame with the window that ends at it, if any.

        The last frame always ends a window, marked as full: it is the only window of a video
        that is shorter than a window.
        """
        previous = None
        for image in frames:
            if previous is not None:
                yield previous, self._add(previous)
            previous = image
        if previous is not None:
            window = self._add(previous) or self._score()
            yield previous, window._replace(full=True)

    def _add(self, image: np.ndarray) -> Window | None:
        self._recent.append(self._crop(image))
        self._count += 1
        # Full windows end at length, length + stride, ...; partial ones before at each stride.
        excess = self._count - self._length
        frames_since_window = (excess if excess >= 0 else self._count) % self._stride
        return self._score() if frames_since_window == 0 else None

    def _crop(self, image: np.ndarray) -> np.ndarray:
        size, (height, width) = self._cfg.DATA.TEST_CROP_SIZE, image.shape[:2]
        region = whole_frame(height, width, size)
        scaled = cv2.resize(image, (region.out_width, region.out_height))  # bilinear, as in data
        return uniform_crop(scaled, size, 1).copy()  # a NumPy view would keep the whole frame

    def _score(self) -> Window:
        held = len(self._recent)
        indices = dataset_class(self._cfg, "TEST").window_frames(self._cfg, held, self._length)
        clip = self._normalize(np.stack([self._recent[index] for index in indices]))
        scores = score_views(self._model, clip[None], self._cfg).numpy()
        start, end = (self._count - held) / self._fps, self._count / self._fps
        if not np.isfinite(scores).all():
            raise DecodeError(f"the scores at {end:.2f} seconds are not finite")
        return Window(start, end, scores, held == self._length, self._names)
