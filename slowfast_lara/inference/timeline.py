"""Plot of a stream's class scores over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slowfast_lara.drawing import lines_or_bars, plain_text, saved_figure
from slowfast_lara.inference.stream import Window
from slowfast_lara.labels import top_classes


class Timeline:
    """Scores over time. Once there are `capacity` points, adjacent points are averaged in pairs."""

    def __init__(self, capacity: int = 2048) -> None:
        self._capacity = capacity
        self._points: list[np.ndarray] = []  # arrays [1 + classes]: time, then scores
        self._windows_per_point = 1
        self._pending: list[np.ndarray] = []

    def add(self, window: Window) -> None:
        middle = (window.start + window.end) / 2
        self._pending.append(np.append(np.float32(middle), window.scores))
        if len(self._pending) < self._windows_per_point:
            return
        self._points.append(np.mean(self._pending, axis=0))
        self._pending = []
        if len(self._points) == self._capacity:
            pairs = np.stack(self._points).reshape(self._capacity // 2, 2, -1)
            self._points = list(pairs.mean(axis=1))
            self._windows_per_point *= 2

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Times of the points in seconds (middles of windows), and scores [points, classes]."""
        unfinished = [np.mean(self._pending, axis=0)] if self._pending else []
        table = np.stack([*self._points, *unfinished])
        return table[:, 0], table[:, 1:]

    def plot(self, path: str, names: Sequence[str], title: str, classes: int = 5) -> None:
        """Plot the classes with the highest peak scores: lines, or bars if there is one point."""
        times, scores = self.points()
        best = top_classes(torch.from_numpy(scores.max(0)), classes).tolist()
        with saved_figure(path, (9, 3.6)) as (_, (axis,)):
            axis.set_title(plain_text(title), fontsize=9)
            marker = "." if len(times) < 60 else ""
            styles = [{"color": f"C{row % 10}", "marker": marker} for row in range(len(best))]
            lines_or_bars(axis, times, {names[label]: scores[:, label] for label in best}, styles)
            if len(times) == 1:
                axis.set(xlabel=f"score around {times[0]:.1f} seconds", xlim=(0, 1.1))
            else:
                axis.set(xlabel="seconds", ylabel="score", ylim=(-0.02, 1.02))
                axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
