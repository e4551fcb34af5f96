"""Kinds of labels, and the ranking of classes by score.

A clip has one class, several classes (DATA.MULTI_LABEL, as in Charades), or a verb and a noun
(EPIC-KITCHENS). A model has one classifier per part of the label; the scores of all parts are
concatenated into one vector.

Labels of a batch are int64: [B] for one class, [B, 2] for verb and noun, and multi-hot [B, classes]
for several classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

# One class, a (verb, noun) pair, or all classes of a clip with several classes.
Label = int | tuple[int, ...]


class LabelKind(NamedTuple):
    """Number of classes of each part of a label, and whether a clip has several classes."""

    parts: dict[str, int]  # {"": classes}, or {"verb": verbs, "noun": nouns}
    several: bool = False

    @property
    def num_classes(self) -> int:
        """Number of scores per clip, over all parts."""
        return sum(self.parts.values())

    @property
    def is_pair(self) -> bool:
        return len(self.parts) > 1

    @property
    def description(self) -> str:
        """Description of the valid labels, for error messages."""
        if self.is_pair:
            return f"a (verb, noun) tuple of integers from 0, below {tuple(self.parts.values())}"
        number = f"from 0 to {self.num_classes - 1} (MODEL.NUM_CLASSES)"
        return f"a tuple of integers {number}" if self.several else f"an integer {number}"

    def has_label(self, label: object) -> bool:
        """Whether `label` is a label of this kind."""
        if isinstance(label, tuple) != (self.is_pair or self.several):
            return False
        numbers = label if isinstance(label, tuple) else (label,)
        limits = [self.num_classes] * len(numbers) if self.several else [*self.parts.values()]
        return len(numbers) == len(limits) and all(
            isinstance(number, (int, np.integer)) and 0 <= number < limit
            for number, limit in zip(numbers, limits)
        )

    def split(self, scores: Tensor) -> dict[str, Tensor]:
        """Split scores into the parts of the label, each [..., classes of the part]."""
        return dict(zip(self.parts, scores.split(list(self.parts.values()), dim=-1)))

    def split_names(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Split class names, given in the order of the scores, into the parts of the label."""
        rest = iter(names)
        return {part: list(islice(rest, size)) for part, size in self.parts.items()}

    def name_of(self, label: Label, names: Sequence[str]) -> str:
        """The name of a label; `names` are the class names in the order of the scores."""
        if isinstance(label, int):
            return names[label]
        if not self.is_pair:
            return ", ".join(names[number] for number in label)
        verb, noun = label
        return f"{names[verb]} {names[self.parts['verb'] + noun]}"


def label_kind(cfg: CfgNode) -> LabelKind:
    """The kind of labels that a config trains on."""
    classes = cfg.MODEL.NUM_CLASSES
    if cfg.TRAIN.DATASET.lower() == "epickitchens":
        return LabelKind(
            {"verb": classes, "noun": cfg.get("EPICKITCHENS", {}).get("NUM_NOUNS", 300)}
        )
    return LabelKind({"": classes}, several=cfg.DATA.get("MULTI_LABEL", False))


def top_classes(scores: Tensor, count: int = 5) -> Tensor:
    """The `count` (or all) classes with the highest scores, best first: [..., count].

    Ties go to the lower class index. All rankings use this function, because the order of ties in
    `topk` is undefined.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def top_actions(scores: Tensor, kind: LabelKind, count: int = 5) -> tuple[Tensor, Tensor]:
    """The (verb, noun) pairs with the largest products of scores, [B, count, 2], and the products.

    The scores must be probabilities, not logits. Ties go to the lower verb index, then to the lower
    noun index. Only the best `count` verbs and the best `count` nouns are combined: these pairs
    always include the best `count` pairs.
    """
    verbs, nouns = kind.split(scores)["verb"], kind.split(scores)["noun"]
    best_verbs, best_nouns = (top_classes(x, count).sort(dim=-1).values for x in (verbs, nouns))
    products = (
        verbs.gather(-1, best_verbs)[..., :, None] * nouns.gather(-1, best_nouns)[..., None, :]
    )
    order = top_classes(products.flatten(-2), count)
    width = best_nouns.shape[-1]
    pairs = best_verbs.gather(-1, order // width), best_nouns.gather(-1, order % width)
    return torch.stack(pairs, dim=-1), products.flatten(-2).gather(-1, order)
