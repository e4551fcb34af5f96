"""Accuracy and speed of a trained model if its attention is replaced, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slowfast_lara.analysis.measure import best_times
from slowfast_lara.analysis.settings import fitting_numbers, has_landmarks, token_counts
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.data.dataset import VideoViews
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.drawing import attention_styles, plain_text, saved_figure
from slowfast_lara.errors import CheckpointError, ConfigError, InputError, RunError, counted
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel, with_views
from slowfast_lara.inference.scoring import score_views, view_outputs, views_at_a_time
from slowfast_lara.labels import LabelKind, label_kind, top_actions, top_classes
from slowfast_lara.models.attention_config import chosen_estimator, display_name, resolve_attention
from slowfast_lara.progress import progress_bar

REPEATS = 5


class SwapResult(NamedTuple):
    """Accuracy in % and speed of a model with one attention."""

    attention: str
    # Number of landmarks, samples, or groups of keys per frame. None for the trained attention, and
    # for attentions without such a number.
    landmarks: int | None
    top1: float
    top5: float
    same_top1: float  # % of videos with the same top-1 class as with the trained attention
    view_seconds: float


@dataclass
class SwapTable(ResultTable):
    """Results of each attention; the first row is the trained attention."""

    results: list[SwapResult] = field(default_factory=list)

    def cells(self) -> Cells:
        rows = [
            [
                result.attention,
                "" if result.landmarks is None else result.landmarks,
                *(f"{share:.1f}" for share in (result.top1, result.top5, result.same_top1)),
                f"{1e3 * result.view_seconds:.2f}",
            ]
            for result in self.results
        ]
        titles = ["attention", "landmarks", "top-1, %", "top-5, %", "same top-1, %", "ms per view"]
        return [titles, *rows]

    def plot(self, path: str) -> None:
        with saved_figure(path, (6, 4.2)) as (figure, (axis,)):
            names = list(dict.fromkeys(result.attention for result in self.results))
            for name, style in zip(names, attention_styles(names)):
                results = [r for r in self.results if r.attention == name]
                times = [1e3 * result.view_seconds for result in results]
                axis.plot(times, [result.top1 for result in results], label=name, **style)
            axis.set(xlabel="time per view, ms", ylabel="top-1 accuracy, %")
            axis.legend(fontsize=8)
            figure.suptitle(plain_text(self.title), fontsize=9)


def swap(
    model_files: tuple[str, str | None],
    overrides: Sequence[str],
    *,
    attentions: Sequence[str] | None,
    landmarks: Sequence[int],
    views: int | None,
    videos: int | None,
) -> SwapTable:
    """Test a model with its trained attention, and with each attention and number of landmarks."""
    model = load(*model_files, overrides=overrides)
    kind = label_kind(model.cfg)
    if kind.several:
        raise InputError("swap needs one class per video; this model predicts several")
    model.cfg = with_views(model.cfg, views)
    table = SwapTable(f"{model.path} with attentions that it was not trained with")
    models = _swapped_models(model, attentions or [*ESTIMATORS], landmarks, table.notes)
    scores, labels, views_to_time = test_models(models, videos, table.notes)
    jobs = {
        str(key): partial(view_outputs, model.network, views_to_time, model.cfg)
        for key, model in models.items()
    }
    seconds = [best / len(views_to_time) for best in best_times(jobs, REPEATS).values()]
    orders = [_top5(torch.from_numpy(model_scores), kind) for model_scores in scores]
    for key, order, view_seconds in zip(models, orders, seconds):
        if failed := int((order < 0).all((1, 2)).sum()):
            number = "" if key[1] is None else f" with {key[1]}"
            table.notes.append(
                f"{key[0]}{number}: the scores of {counted(failed, 'video')} are not finite and "
                "count as wrong"
            )
        correct = (order == labels.reshape(len(labels), 1, -1)).all(-1)
        guessed = (order[:, 0] >= 0).all(-1)
        same_class = guessed & (order[:, 0] == orders[0][:, 0]).all(-1)
        top1, top5, same = (
            100 * float(share.mean()) for share in (correct[:, 0], correct.any(1), same_class)
        )
        table.results.append(SwapResult(*key, top1, top5, same, view_seconds))
    return table


def _top5(scores: Tensor, kind: LabelKind) -> np.ndarray:
    """The top-5 labels of each video: [videos, 5, 2] for (verb, noun), otherwise [videos, 5, 1].

    The labels of a video whose scores are not finite are -1.
    """
    order = top_actions(scores, kind)[0] if kind.is_pair else top_classes(scores)[..., None]
    return order.masked_fill(~scores.isfinite().all(1)[:, None, None], -1).numpy()


def _swapped_models(
    model: TrainedModel, attentions: Sequence[str], landmarks: Sequence[int], notes: list[str]
) -> dict[tuple[str, int | None], TrainedModel]:
    """Models by (attention, number of landmarks), the trained model first.

    Adds a note to `notes` for invalid pairs, and for attentions that draw buffers from the seed.
    """
    as_trained = f"{display_name(chosen_estimator(model.cfg))} (as trained)"
    models: dict[tuple[str, int | None], TrainedModel] = {(as_trained, None): model}
    estimators = {name: resolve_attention(name)[0] for name in attentions}
    for name, estimator in estimators.items():
        counts: Sequence[int | None] = [None]
        if has_landmarks(estimator):
            counts = fitting_numbers(estimator, landmarks, *token_counts(model.cfg), notes)
        for count in counts:
            options = {} if count is None else {"num_landmarks": count}
            try:
                swapped = model.with_attention(name, **options)
            except (ConfigError, CheckpointError) as error:
                number = "" if count is None else f" with {count}"
                notes.append(f"skipped {name}{number}: {error}")
                continue
            note = f"{name}: not trained, drawn from the seed: {', '.join(swapped.from_seed)}"
            if swapped.from_seed and note not in notes:
                notes.append(note)
            models[display_name(name), count] = swapped
    return models


def test_models(
    models: Mapping[Any, TrainedModel], videos: int | None, notes: list[str]
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Compute scores [models, videos, classes]; also returns labels and a batch of views to time.

    Uses `videos` test videos, evenly spaced over the list; None: all. Each video is decoded once
    for all models. A note is added for each video that fails.
    """
    cfg = next(iter(models.values())).cfg
    dataset = dataset_class(cfg, "TEST")(cfg, "test")
    some = np.linspace(0, len(dataset) - 1, min(videos or len(dataset), len(dataset)))
    scores, labels, views = [], [], torch.empty(0)
    with progress_bar(len(some), "swap", unit="video") as bar:
        for index in some.round().astype(int).tolist():
            video = dataset[index]
            assert isinstance(video, VideoViews)  # the type of samples in test mode
            bar.update()
            if video.views is None:
                notes.append(f"not counted: {video.path}: {video.error}")
                continue
            views = video.views
            scores.append([score_views(m.network, views, m.cfg).numpy() for m in models.values()])
            labels.append(video.label)
    if not labels:
        raise RunError(f"none of {counted(len(some), 'test video')} could be read")
    return np.stack(scores, axis=1), np.array(labels), views[: views_at_a_time(cfg)]
