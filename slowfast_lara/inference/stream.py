"""Sliding windows over a video of any length.

Each frame is cropped when it arrives, and only the frames of the current window are kept. So
memory does not depend on the length of the video.
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
from slowfast_lara.inference.prediction import Ranking, format_ranking, rank_classes
from slowfast_lara.inference.scoring import score_views
from slowfast_lara.labels import LabelKind, label_kind


class Window(NamedTuple):
    """The prediction for one window of a stream.

    Attributes:
        start: start of the window, in seconds from the start of the video.
        end: end of the window, in seconds from the start of the video.
        scores: float32 [classes], as those of a `Prediction`.
        full: False if the window would begin before the video; `run` marks the last one as full.
        names: a name for each class.
        kind: the kind of labels of the model; None: one class.
    """

    start: float
    end: float
    scores: np.ndarray
    full: bool
    names: Sequence[str] = ()
    kind: LabelKind | None = None

    def top(self, count: int = 5) -> Ranking:
        """The `count` classes or actions with the highest scores; see `Prediction.top`."""
        return rank_classes(self.scores, self.names, count, self.kind)

    def __repr__(self) -> str:
        best = format_ranking(self.top()) if self.names else f"{len(self.scores)} scores"
        return f"{self.start:.2f} to {self.end:.2f} s: {best}"


class WindowScorer:
    """Scores the most recent window of frames once per stride; uses the centre crop.

    `window` and `stride` are in seconds. Default of `window`: the time span of a clip, or 4 for
    Ssv2 models. Default of `stride`: half a window.
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
        """Yield each frame with the window that ends at this frame, or None.

        A window always ends at the last frame and is marked as full, so that a video shorter than
        one window has one full window.
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
        # The first full window ends after `length` frames, and one more after every stride. Before
        # that, a partial window ends after every stride.
        excess = self._count - self._length
        frames_since_window = (excess if excess >= 0 else self._count) % self._stride
        return self._score() if frames_since_window == 0 else None

    def _crop(self, image: np.ndarray) -> np.ndarray:
        size, (height, width) = self._cfg.DATA.TEST_CROP_SIZE, image.shape[:2]
        region = whole_frame(height, width, size)
        scaled = cv2.resize(image, (region.out_width, region.out_height))  # bilinear, as in tests
        return uniform_crop(scaled, size, 1).copy()  # a view would keep the frame in memory

    def _score(self) -> Window:
        held = len(self._recent)
        indices = dataset_class(self._cfg, "TEST").window_frames(self._cfg, held, self._length)
        clip = self._normalize(np.stack([self._recent[index] for index in indices]))
        scores = score_views(self._model, clip[None], self._cfg).numpy()
        start, end = (self._count - held) / self._fps, self._count / self._fps
        if not np.isfinite(scores).all():
            raise DecodeError(f"the scores at {end:.2f} seconds are not finite")
        full, kind = held == self._length, label_kind(self._cfg)
        return Window(start, end, scores, full, self._names, kind)
