"""Predictions: the class scores of a video, and the classes with the highest scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from slowfast_lara.errors import DecodeError, printable
from slowfast_lara.labels import LabelKind, top_actions, top_classes


class Ranking(NamedTuple):
    """Class indices, names and scores in three lists, in descending order of score.

    For a model of verbs and nouns, a class is a pair of indices.
    """

    classes: list[Any]
    names: list[str]
    scores: list[float]

    def to_dict(self) -> dict[str, Any]:
        """The five best classes as a dictionary with the keys of the JSON files."""
        named = {"top5_names": self.names[:5]} if self.names else {}
        return {"top5": self.classes[:5], **named, "top5_scores": self.scores[:5]}


class ClassScore(NamedTuple):
    """Name and score of a class."""

    name: str
    score: float


def rank_classes(
    scores: np.ndarray, names: Sequence[str], count: int = 5, kind: LabelKind | None = None
) -> Ranking:
    """The `count` best classes or, for a model of verbs and nouns, the best actions.

    If `names` is empty, the ranking has no names.
    """
    values = torch.from_numpy(scores)
    if kind is None or not kind.is_pair:
        best = top_classes(values, count)
        return Ranking(best.tolist(), [names[i] for i in best if names], values[best].tolist())
    pairs, products = top_actions(values, kind, count)
    labels = [(verb, noun) for verb, noun in pairs.tolist()]
    named = [kind.name_of(label, names) for label in labels if names]
    return Ranking(labels, named, products.tolist())


def format_ranking(ranking: Ranking) -> str:
    """The classes of a ranking as one line: "cooking 61.5%, eating 20.3%, ..."."""
    _, names, scores = ranking
    return ", ".join(f"{printable(name)} {score:.1%}" for name, score in zip(names, scores))


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Sequence[ClassScore]):
    """The prediction for one video: a sequence of (name, score) pairs, the likeliest class first.

    `prediction[0]` is the likeliest class, and `dict(prediction)` maps names to scores. The
    prediction of a video that cannot be read has an `error` and no classes; reading its classes
    raises DecodeError.

    Attributes:
        scores: float32 [classes], combined over the views as in a test (DATA.ENSEMBLE_METHOD); for
            a model of verbs and nouns, the scores of the verbs, then those of the nouns.
        names: a name for each class.
        num_views: number of views (clips x crops) that `scores` combines.
        path: the path of the video; None for frames in memory.
        error: why a video of a list could not be read; None if it could.
        kind: the kind of labels of the model; None: one class per video.
    """

    scores: np.ndarray
    names: Sequence[str]
    num_views: int
    path: str | None = None
    error: str | None = None
    kind: LabelKind | None = None

    def top(self, count: int = 5) -> Ranking:
        """The `count` classes with the highest scores: their indices, names and scores.

        For a model of verbs and nouns, the best actions; their score is verb score * noun score.
        """
        if self.error is not None:
            raise DecodeError(f"{self.path or 'frames'}: {self.error}")
        return rank_classes(self.scores, self.names, count, self.kind)

    def top_parts(self, count: int = 5) -> dict[str, Ranking]:
        """The best verbs and nouns as {"verb": ..., "noun": ...}; {} for other models."""
        if self.kind is None or not self.kind.is_pair:
            return {}
        scores, names = self.kind.split(torch.from_numpy(self.scores)), self.names
        return {
            part: rank_classes(scores[part].numpy(), part_names, count)
            for part, part_names in self.kind.split_names(names).items()
        }

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with the path, the number of views and the five likeliest classes.

        `slowfast-lara predict --json` writes the same objects. For a model of verbs and nouns, the
        classes are actions, and the object also has the likeliest verbs and nouns. If the video
        cannot be read, the object has only the path and the error.
        """
        if self.error is not None:
            return {"path": self.path, "error": self.error}
        parts = {part: ranking.to_dict() for part, ranking in self.top_parts().items()}
        return {"path": self.path, "num_views": self.num_views, **self.top().to_dict(), **parts}

    def __len__(self) -> int:
        return len(self.scores) if self.kind is None else math.prod(self.kind.parts.values())

    def __iter__(self) -> Iterator[ClassScore]:
        return iter(self[:])  # a slice sorts the classes once; self[i] would sort them for every i

    @overload
    def __getitem__(self, index: int) -> ClassScore: ...
    @overload
    def __getitem__(self, index: slice) -> list[ClassScore]: ...
    def __getitem__(self, index: int | slice) -> ClassScore | list[ClassScore]:
        _, names, scores = self.top(len(self))
        return list(map(ClassScore, names, scores))[index]

    def __repr__(self) -> str:
        return f"error: {self.error}" if self.error is not None else format_ranking(self.top())
