"""Sliding windows over a video of any length.

Each frame is cropped when it arrives, and only the frames of the current window are kept. So
memory does not depend on the length of the video.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.sources import TimedFrame
from slowfast_lara.data.transforms import Normalize, test_crop, test_frame
from slowfast_lara.data.video import MAX_FPS
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
        full: False for windows at the start of the video that are shorter than the `window` of
            `WindowScorer`. The last window from `WindowScorer.run` is always marked as full.
        names: a name for each class.
        kind: the kind of labels of the model; None: one class per video.
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

    `window` and `stride` are in seconds. Default of `window`: the time span of a clip, or 4 seconds
    for Ssv2 models. Default of `stride`: half a window. The timestamps of the frames determine
    which frames a window contains; start and end of a window are rounded to the nearest frame.
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
        self._model, self._cfg, self._names = model, cfg, names
        self._window = window or dataset_class(cfg, "TEST").window_seconds(cfg)
        self._stride = stride or self._window / 2
        self._length = max(1, round(self._window * fps))  # average frames per window
        self._half_frame = 0.5 / fps
        # Limit the number of frames: damaged timestamps must not fill the memory.
        limit = max(self._length, round(self._window * MAX_FPS))
        # (start time in seconds, cropped frame) of each frame of the current window.
        self._recent: deque[tuple[float, np.ndarray]] = deque(maxlen=limit)
        self._position = (False, 0)
        self._normalize = Normalize(cfg.DATA)

    def run(self, frames: Iterable[TimedFrame]) -> Iterator[tuple[np.ndarray, Window | None]]:
        """Yield each frame with the window that ends with this frame, or None.

        The last frame always ends a window. This window is marked as full, so that a video shorter
        than `window` has one full window.
        """
        previous = None
        for frame in frames:
            if previous is not None:
                yield previous.pixels, self._add(previous)
            previous = frame
        if previous is not None:
            window = self._add(previous) or self._score(previous.end)
            yield previous.pixels, window._replace(full=True)

    def _add(self, frame: TimedFrame) -> Window | None:
        self._recent.append((frame.start, self._crop(frame.pixels)))
        first = frame.end - self._window
        while len(self._recent) > 1 and self._recent[1][0] <= first + self._half_frame:
            self._recent.popleft()
        # Partial windows end once per stride, until the first full window ends after `window`
        # seconds. From then on, full windows end once per stride.
        before, self._position = self._position, self._position_at(frame.end)
        return self._score(frame.end) if self._position != before else None

    def _position_at(self, end: float) -> tuple[bool, int]:
        """Whether the first full window has ended by `end`, and the number of strides since then.

        Before the end of the first full window, strides are counted from the start of the video.
        """
        is_full = end + self._half_frame >= self._window
        seconds = end + self._half_frame - (self._window if is_full else 0)
        return is_full, int(seconds / self._stride)

    def _crop(self, image: np.ndarray) -> np.ndarray:
        region = test_frame(image.shape[0], image.shape[1], self._cfg.DATA)
        scaled = np.empty((region.out_height, region.out_width, 3), np.uint8)
        region.cut(image, scaled)
        # Copy the crop: a NumPy view would keep the whole frame in memory.
        return test_crop(scaled, 1, self._cfg.DATA).copy()

    def _score(self, end: float) -> Window:
        is_full, held = self._position[0], len(self._recent)
        length = held if is_full else max(held, self._length)
        indices = dataset_class(self._cfg, "TEST").window_frames(self._cfg, held, length)
        clip = self._normalize(np.stack([self._recent[index][1] for index in indices]))
        scores = score_views(self._model, clip[None], self._cfg).numpy()
        if not np.isfinite(scores).all():
            raise DecodeError(f"the scores at {end:.2f} seconds are not finite")
        # The oldest frame may have started long before the window.
        start = self._recent[0][0]
        if start < end - self._window - self._half_frame:
            start = end - self._window
        return Window(start, end, scores, is_full, self._names, label_kind(self._cfg))
