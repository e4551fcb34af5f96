"""Predictions: the class scores of a video, and the classes with the highest scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slowfast_lara.errors import printable


class Ranking(NamedTuple):
    """Class indices, names and scores in three lists, sorted by falling score."""

    classes: list[int]
    names: list[str]
    scores: list[float]


def top_classes(scores: np.ndarray, names: Sequence[str], count: int = 5) -> Ranking:
    best = np.argsort(-scores, kind="stable")[:count].tolist()
    return Ranking(best, [names[i] for i in best], [float(scores[i]) for i in best])


def format_ranking(ranking: Ranking) -> str:
    """The classes of a ranking as one line: "name score %, name score %, ..."."""
    _, names, scores = ranking
    return ", ".join(f"{printable(name)} {score:.1%}" for name, score in zip(names, scores))


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """The prediction for one video.

    Attributes:
        scores: float32 [classes], the softmax scores averaged over the views, as in a test.
        names: a name for each class.
        num_views: number of views (clips x crops) averaged.
    """

    scores: np.ndarray
    names: Sequence[str]
    num_views: int

    def top(self, count: int = 5) -> Ranking:
        """The `count` classes with the highest scores: their indices, names and scores."""
        return top_classes(self.scores, self.names, count)

    def __repr__(self) -> str:
        return format_ranking(self.top())
