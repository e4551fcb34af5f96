"""What a model says of a video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slowfast_lara.errors import printable


class Ranking(NamedTuple):
    """The best classes first."""

    classes: list[int]
    names: list[str]
    scores: list[float]


def rank(scores: np.ndarray, names: Sequence[str], count: int = 5) -> Ranking:
    best = np.argsort(-scores, kind="stable")[:count].tolist()
    return Ranking(best, [names[i] for i in best], [float(scores[i]) for i in best])


def shown(ranking: Ranking) -> str:
    """Names with their scores, in a line."""
    _, names, scores = ranking
    return ", ".join(f"{printable(name)} {score:.1%}" for name, score in zip(names, scores))


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """`scores` float32 [classes] are the mean softmax over the views, as in a test."""

    scores: np.ndarray
    names: Sequence[str]
    num_views: int

    def top(self, count: int = 5) -> Ranking:
        """The likeliest classes: their numbers, names and scores."""
        return rank(self.scores, self.names, count)

    def __repr__(self) -> str:
        return shown(self.top())
