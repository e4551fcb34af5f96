"""The plot of a stream's scores over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slowfast_lara.drawing import lines_or_bars, plain_text, saved_figure
from slowfast_lara.inference.stream import Window


class Timeline:
    """Scores over time, of bounded size: when full, neighbours are averaged."""

    def __init__(self, num_classes: int, capacity: int = 2048) -> None:
        self._times = np.zeros(capacity)
        self._scores = np.zeros((capacity, num_classes), np.float32)
        self._filled = 0
        # Windows that make up a point: 1, 2, 4, ...; and those of the unfinished one.
        self._per_point = 1
        self._pending: list[Window] = []

    def add(self, window: Window) -> None:
        self._pending.append(window)
        if len(self._pending) < self._per_point:
            return
        if self._filled == len(self._times):
            half = self._filled // 2
            self._times[:half] = self._times[: 2 * half].reshape(half, 2).mean(1)
            pairs = self._scores[: 2 * half].reshape(half, 2, -1)
            self._scores[:half] = pairs.mean(1)
            self._filled, self._per_point = half, 2 * self._per_point
            return
        self._times[self._filled], self._scores[self._filled] = self._mean_of_pending()
        self._filled += 1
        self._pending = []

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Times (the windows' middles, seconds) and scores [points, classes]."""
        times, scores = self._times[: self._filled], self._scores[: self._filled]
        if self._pending:
            time, score = self._mean_of_pending()
            times, scores = np.append(times, time), np.vstack((scores, score))
        return times, scores

    def _mean_of_pending(self) -> tuple[float, np.ndarray]:
        middles = [(window.start + window.end) / 2 for window in self._pending]
        return float(np.mean(middles)), np.mean([w.scores for w in self._pending], axis=0)

    def plot(self, path: str, names: Sequence[str], title: str, classes: int = 5) -> None:
        """The classes with the highest peaks, as lines; of a single window, as bars."""
        times, scores = self.points()
        shown = np.argsort(-scores.max(0), kind="stable")[:classes]
        with saved_figure(path, (9, 3.6)) as (_, (axis,)):
            axis.set_title(plain_text(title), fontsize=9)
            style = ".-" if len(times) < 60 else "-"
            lines_or_bars(axis, times, {names[label]: scores[:, label] for label in shown}, style)
            if len(times) == 1:
                axis.set(xlabel=f"score around {times[0]:.1f} seconds", xlim=(0, 1.1))
            else:
                axis.set(xlabel="seconds", ylabel="score", ylim=(-0.02, 1.02))
                axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
