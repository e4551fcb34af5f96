"""Loss and metrics for each kind of label.

- One class: cross-entropy; top-1 and top-5 accuracy.
- Verb and noun: the mean of the two cross-entropies; top-1 and top-5 accuracies of verbs, nouns and
  actions. An action is a (verb, noun) pair; its score is the product of the two scores.
- Several classes: binary cross-entropy; mean average precision (mAP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.labels import LabelKind, top_actions, top_classes


def classification_loss(
    logits: Tensor, labels: Tensor, kind: LabelKind, smoothing: float
) -> Tensor:
    if kind.several:
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    losses = [
        functional.cross_entropy(part, label, label_smoothing=smoothing)
        for part, label in zip(kind.split(logits).values(), labels.view(len(labels), -1).unbind(1))
    ]
    return torch.stack(losses).mean() if kind.is_pair else losses[0]


def score_loss(scores: Tensor, labels: Tensor, kind: LabelKind) -> Tensor:
    """`classification_loss` without label smoothing, computed from probabilities, not logits."""
    if kind.several:  # binary_cross_entropy clamps the logarithms itself
        return functional.binary_cross_entropy(scores, labels.to(scores.dtype))
    # A tiny probability may be rounded to 0, whose logarithm is -inf.
    log_scores = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
    return classification_loss(log_scores, labels, kind, smoothing=0.0)


def accuracy_names(kind: LabelKind) -> list[str]:
    """Names of the counts that `count_correct` returns."""
    parts = ["verb_", "noun_", "action_"] if kind.is_pair else [""]
    return [] if kind.several else [f"{part}top{k}" for part in parts for k in (1, 5)]


def main_metric(stats: Mapping[str, Any]) -> tuple[str, float]:
    """Name and error in percent of the metric that decides which checkpoint is best."""
    if "map" in stats:
        return "mAP", 100.0 - float(stats["map"])
    if "action_top1_err" in stats:
        return "action top-1", float(stats["action_top1_err"])
    return "top-1", float(stats["top1_err"])


def correct_ranks(scores: Tensor, labels: Tensor, kind: LabelKind) -> dict[str, Tensor]:
    """Whether each top-5 prediction is correct: bool [B, 5], by key "", or verb, noun, action.

    With fewer than five classes, the tensor has one column per class.
    """
    if not kind.is_pair:
        return {"": top_classes(scores) == labels[:, None]}
    parts = kind.split(scores)
    actions = (top_actions(scores, kind)[0] == labels[:, None]).all(dim=-1)
    ranks = {name: top_classes(parts[name]) == labels[:, i, None] for i, name in enumerate(parts)}
    return {**ranks, "action": actions}


def count_correct(scores: Tensor, labels: Tensor, kind: LabelKind) -> list[Tensor]:
    """Count the top-1 and top-5 correct predictions; the counts stay on the device.

    The list has the order of `accuracy_names`; for clips with several classes, it is empty.

    PySlowFast's `topks_correct` raises for more than one video: it calls `view` on a transposed
    tensor, which PyTorch no longer allows.
    """
    if kind.several:
        return []
    ranks = correct_ranks(scores, labels, kind).values()
    return [count for part in ranks for count in (part[:, 0].sum(), part.sum())]


def metrics(scores: Tensor, labels: Tensor, kind: LabelKind) -> dict[str, float]:
    """The accuracies `*_acc`, or the mean average precision `map`, in percent.

    The mean is over the classes with a positive video; it is 0 if there is no such class.
    """
    if kind.several:
        by_class = average_precisions(scores.numpy(), labels.numpy().astype(bool))
        return {"map": 100.0 * float(np.mean([*by_class.values()])) if by_class else 0.0}
    counts = count_correct(scores, labels, kind)
    return {
        f"{name}_acc": 100.0 * count.item() / len(scores)
        for name, count in zip(accuracy_names(kind), counts)
    }


def average_precisions(scores: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """The average precision, from 0 to 1, of each class with a positive video.

    `scores` and `labels` are [videos, classes].

    The average precision is the sum of (increase in recall) * precision over the thresholds. Videos
    with equal scores share a threshold, so that their order does not matter.
    """
    found = {}
    for label in np.flatnonzero(labels.any(axis=0)).tolist():
        order = np.argsort(-scores[:, label], kind="stable")
        ranked, positive = scores[order, label], labels[order, label]
        ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        hits = np.cumsum(positive)[ends]
        found[label] = float(np.sum(np.diff(hits, prepend=0) / hits[-1] * hits / (ends + 1)))
    return found


def per_class(
    scores: Tensor, labels: Tensor, kind: LabelKind, names: Sequence[str] | None
) -> dict[str, Any]:
    """Per class with a video: top-1 accuracy or average precision in percent, and number of videos.

    For (verb, noun) labels, the result has one such table for verbs and one for nouns.

    `names` has a name for each score; if it is None, the result has no names.
    """
    if kind.several:
        by_class = average_precisions(scores.numpy(), labels.numpy().astype(bool))
        return {
            str(label): {
                **_name(label, names),
                "ap": 100.0 * value,
                "num_videos": int(labels[:, label].sum()),
            }
            for label, value in by_class.items()
        }
    ranks = correct_ranks(scores, labels, kind)
    if not kind.is_pair:
        return _top1_by_class(ranks[""][:, 0], labels, names)
    part_names = kind.split_names(names) if names else {}
    return {
        part: _top1_by_class(ranks[part][:, 0], labels[:, i], part_names.get(part))
        for i, part in enumerate(kind.parts)
    }


def _top1_by_class(
    correct: Tensor, labels: Tensor, names: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    by_class = {label: correct[labels == label] for label in labels.unique().tolist()}
    return {
        str(label): {
            **_name(label, names),
            "top1_acc": 100.0 * part.double().mean().item(),
            "num_videos": len(part),
        }
        for label, part in by_class.items()
    }


def _name(label: int, names: Sequence[str] | None) -> dict[str, str]:
    return {"name": names[label]} if names else {}
