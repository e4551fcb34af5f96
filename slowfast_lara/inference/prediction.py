"""Predictions: the class scores of a video, and the classes with the highest scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np

from slowfast_lara.errors import DecodeError, printable


class Ranking(NamedTuple):
    """Class indices, names and scores in three lists, sorted by falling score."""

    classes: list[int]
    names: list[str]
    scores: list[float]

    def to_dict(self) -> dict[str, Any]:
        """The five best classes, with the names in JSON files."""
        classes, names, scores = self
        return {"top5": classes[:5], "top5_names": names[:5], "top5_scores": scores[:5]}


class ClassScore(NamedTuple):
    """Name and score of a class."""

    name: str
    score: float


def top_classes(scores: np.ndarray, names: Sequence[str], count: int = 5) -> Ranking:
    best = np.argsort(-scores, kind="stable")[:count].tolist()
    return Ranking(best, [names[i] for i in best], [float(scores[i]) for i in best])


def format_ranking(ranking: Ranking) -> str:
    """The classes of a ranking as one line: "name score %, name score %, ..."."""
    _, names, scores = ranking
    return ", ".join(f"{printable(name)} {score:.1%}" for name, score in zip(names, scores))


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Sequence[ClassScore]):
    """The prediction for one video: a sequence of (name, score) pairs, the likeliest class first.

    `prediction[0]` is the likeliest class, and `dict(prediction)` maps names to scores. The
    prediction of a video that cannot be read has an `error` and no classes; reading its classes
    raises DecodeError.

    Attributes:
        scores: float32 [classes], the softmax scores averaged over the views, as in a test.
        names: a name for each class.
        num_views: number of views (clips x crops) averaged.
        path: the path of the video; None for frames in memory.
        error: why the video of a list has no prediction; None if it has one.
    """

    scores: np.ndarray
    names: Sequence[str]
    num_views: int
    path: str | None = None
    error: str | None = None

    def top(self, count: int = 5) -> Ranking:
        """The `count` classes with the highest scores: their indices, names and scores."""
        if self.error is not None:
            raise DecodeError(f"{self.path or 'frames'}: {self.error}")
        return top_classes(self.scores, self.names, count)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object as `slowfast-lara predict --json` writes it for each video.

        It has the path, the number of views and the five likeliest classes, or the path and error.
        """
        if self.error is not None:
            return {"path": self.path, "error": self.error}
        return {"path": self.path, "num_views": self.num_views, **self.top().to_dict()}

    def __len__(self) -> int:
        return len(self.scores)

    @overload
    def __getitem__(self, index: int) -> ClassScore: ...
    @overload
    def __getitem__(self, index: slice) -> list[ClassScore]: ...
    def __getitem__(self, index: int | slice) -> ClassScore | list[ClassScore]:
        _, names, scores = self.top(len(self))
        return list(map(ClassScore, names, scores))[index]

    def __repr__(self) -> str:
        return f"error: {self.error}" if self.error is not None else format_ranking(self.top())
