"""Predictions: the class scores of a video, and the classes with the highest scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from slowfast_lara.errors import printable
from slowfast_lara.labels import LabelKind, top_actions, top_classes


class Ranking(NamedTuple):
    """Class indices, names and scores in three lists, sorted by falling score.

    Of a model of verbs and nouns, a class is a pair of indices.
    """

    classes: list[Any]
    names: list[str]
    scores: list[float]


def rank_classes(
    scores: np.ndarray, names: Sequence[str], count: int = 5, kind: LabelKind | None = None
) -> Ranking:
    """Rank the classes or, if `kind` is a pair, the actions."""
    values = torch.from_numpy(scores)
    if kind is None or not kind.is_pair:
        best = top_classes(values, count)
        return Ranking(best.tolist(), [names[i] for i in best], values[best].tolist())
    pairs, products = top_actions(values, kind, count)
    labels = [(verb, noun) for verb, noun in pairs.tolist()]
    return Ranking(labels, [kind.name_of(x, names) for x in labels], products.tolist())


def format_ranking(ranking: Ranking) -> str:
    """The classes of a ranking as one line: "name score %, name score %, ..."."""
    _, names, scores = ranking
    return ", ".join(f"{printable(name)} {score:.1%}" for name, score in zip(names, scores))


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """The prediction for one video.

    Attributes:
        scores: float32 [classes], the scores averaged over the views, as in a test; of a model of
            verbs and nouns, the scores of the verbs, then those of the nouns.
        names: a name for each class.
        num_views: number of views (clips x crops) averaged.
        kind: the kind of labels of the model; None: one class.
    """

    scores: np.ndarray
    names: Sequence[str]
    num_views: int
    kind: LabelKind | None = None

    def top(self, count: int = 5) -> Ranking:
        """The `count` classes with the highest scores: their indices, names and scores.

        Of a model of verbs and nouns, the actions with the highest products of two scores.
        """
        return rank_classes(self.scores, self.names, count, self.kind)

    def top_parts(self, count: int = 5) -> dict[str, Ranking]:
        """The best verbs and nouns as {"verb": ..., "noun": ...}; {} for other models."""
        if self.kind is None or not self.kind.is_pair:
            return {}
        rankings, start = {}, 0
        for part, size in self.kind.parts.items():
            own = slice(start, start + size)
            rankings[part] = rank_classes(self.scores[own], self.names[own], count)
            start += size
        return rankings

    def __repr__(self) -> str:
        return format_ranking(self.top())
