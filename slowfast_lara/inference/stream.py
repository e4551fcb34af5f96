"""A video of any length, in windows: scores as its frames come.

Frames are cut to the model's crop at once, and only those of the last window are
kept: memory depends on the window, not on the length of the video.
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
from slowfast_lara.inference.prediction import Ranking, rank, shown
from slowfast_lara.inference.scoring import score_views


class Window(NamedTuple):
    """Scores [classes] of the frames from `start` to `end`, in seconds."""

    start: float
    end: float
    scores: np.ndarray
    # False at the beginning, where fewer frames than a window have been seen.
    full: bool
    names: Sequence[str] = ()

    def top(self, count: int = 5) -> Ranking:
        """The likeliest classes: their numbers, names and scores."""
        return rank(self.scores, self.names, count)

    def __repr__(self) -> str:
        best = shown(self.top()) if self.names else f"{len(self.scores)} scores"
        return f"{self.start:.2f} to {self.end:.2f} s: {best}"


class WindowScorer:
    """Takes frames one by one; every stride it scores the last window, centre crop."""

    def __init__(
        self,
        model: nn.Module,
        cfg: CfgNode,
        fps: float,
        window: float | None = None,
        stride: float | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """`window` and `stride` in seconds: what a clip of the model spans, and half of that."""
        self._model, self._cfg, self._fps, self._names = model, cfg, fps, names
        window = window or dataset_class(cfg, "TEST").window_seconds(cfg)
        stride = stride or window / 2
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
        size, (height, width) = self._cfg.DATA.TEST_CROP_SIZE, image.shape[:2]
        region = whole_frame(height, width, size)
        scaled = cv2.resize(image, (region.out_width, region.out_height))  # bilinear, as in data
        return uniform_crop(scaled, size, 1).copy()  # a view would keep the whole frame

    def _score(self) -> Window:
        seen = len(self._recent)
        indices = dataset_class(self._cfg, "TEST").window_frames(self._cfg, seen, self._length)
        clip = self._normalize(np.stack([self._recent[index] for index in indices]))
        scores = score_views(self._model, clip[None], self._cfg).numpy()
        start, end = (self._count - seen) / self._fps, self._count / self._fps
        return Window(start, end, scores, seen == self._length, self._names)
