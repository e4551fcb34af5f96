"""A trained model with other attentions in it: accuracy and time, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slowfast_lara.analysis.measure import best_times
from slowfast_lara.analysis.result_files import aligned_table, csv_text, measured_on
from slowfast_lara.attention import ESTIMATORS, estimator_options
from slowfast_lara.data.dataset import VideoViews
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.drawing import plain_text, saved_figure
from slowfast_lara.errors import CheckpointError, ConfigError, RunError
from slowfast_lara.files import write_text
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel, with_views
from slowfast_lara.inference.scoring import score_views, view_outputs, views_at_a_time
from slowfast_lara.models.attention_config import chosen_estimator, display_name, resolve_estimator
from slowfast_lara.progress import progress_bar

REPEATS = 5
AS_TRAINED = "as trained"


class Choice(NamedTuple):
    """An attention, with a number of landmarks or samples where it has one."""

    attention: str
    landmarks: int | None


class Row(NamedTuple):
    choice: Choice
    top1: float
    top5: float
    same_guess: float  # share of the videos whose first guess is that of the model as trained
    view_seconds: float


@dataclass
class SwapTable:
    """What became of a model, each row beside the model as it was trained, the first row."""

    source: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def head(self) -> list[str]:
        return [f"{self.source} with other attentions, not trained", measured_on(), *self.notes]

    def cells(self) -> list[list[str]]:
        titles = ["attention", "landmarks", "top-1, %", "top-5, %", "same guess, %", "ms a view"]
        rows = [
            [
                row.choice.attention,
                "" if row.choice.landmarks is None else str(row.choice.landmarks),
                *(f"{share:.1f}" for share in (row.top1, row.top5, row.same_guess)),
                f"{1e3 * row.view_seconds:.2f}",
            ]
            for row in self.rows
        ]
        return [titles, *rows]

    def text(self) -> str:
        return "\n".join([*self.head(), aligned_table(self.cells())])

    def write(self, path: str) -> None:
        """PATH.csv and PATH.png."""
        write_text(f"{path}.csv", csv_text(self.cells(), self.head()))
        with saved_figure(f"{path}.png", (6, 4.2)) as (figure, (axis,)):
            for name in dict.fromkeys(row.choice.attention for row in self.rows):
                rows = [row for row in self.rows if row.choice.attention == name]
                times = [1e3 * row.view_seconds for row in rows]
                axis.plot(times, [row.top1 for row in rows], "o-", label=name)
            axis.set(xlabel="time of a view, ms", ylabel="top-1 accuracy, %")
            axis.legend(fontsize=8)
            title = f"{self.source}, not trained with these attentions"
            figure.suptitle(plain_text(title), fontsize=9)


def swap(
    model_files: tuple[str, str | None],
    overrides: Sequence[str],
    *,
    attentions: Sequence[str] | None,
    landmarks: Sequence[int],
    views: int | None,
    videos: int | None,
) -> SwapTable:
    """Test a model as it was trained, and with each attention and number of landmarks."""
    model = load(*model_files, overrides=overrides)
    model.cfg = with_views(model.cfg, views)
    table = SwapTable(model.path)
    names = [resolve_estimator(name) for name in attentions or ESTIMATORS]
    models = _models(model, names, landmarks, table.notes)
    scores, labels, views_to_time = test_models(models, videos, table.notes)
    seconds = _view_times(models, views_to_time)
    trained = scores[0].argmax(1)
    for number, choice in enumerate(models):
        order = np.argsort(-scores[number], axis=1, kind="stable")[:, :5]
        right = order == labels[:, None]
        top1, top5, same = (
            100 * float(found.mean())
            for found in (right[:, 0], right.any(1), order[:, 0] == trained)
        )
        table.rows.append(Row(choice, top1, top5, same, seconds[choice]))
    return table


def _models(
    model: TrainedModel, attentions: Sequence[str], landmarks: Sequence[int], notes: list[str]
) -> dict[Choice, TrainedModel]:
    """The model and its variants, which share its weights; what cannot be made is noted."""
    models = {Choice(f"{display_name(chosen_estimator(model.cfg))} ({AS_TRAINED})", None): model}
    for name in attentions:
        counts: Sequence[int | None] = landmarks if _has_landmarks(name) else [None]
        for count in counts:
            options = {} if count is None else {"num_landmarks": count}
            try:
                swapped = model.with_attention(name, **options)
            except (ConfigError, CheckpointError) as error:
                notes.append(f"left out: {name} with {count}: {error}")
                continue
            note = f"{name} was not trained; start from their seed: {', '.join(swapped.from_seed)}"
            if swapped.from_seed and note not in notes:
                notes.append(note)
            models[Choice(display_name(name), count)] = swapped
    return models


def _has_landmarks(name: str) -> bool:
    """Whether VIT.APPROX_ATTN_DIM means anything to an attention. (RA's samples are its own.)"""
    return not ESTIMATORS[name].exact and "num_samples" not in estimator_options(name)


def test_models(
    models: Mapping[Any, TrainedModel], videos: int | None, notes: list[str]
) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Scores [models, videos, classes], labels, and the views of a video that was read.

    Each video is read once for all models.
    """
    cfg = next(iter(models.values())).cfg
    dataset = dataset_class(cfg, "TEST")(cfg, "test")
    some = np.linspace(0, len(dataset) - 1, min(videos or len(dataset), len(dataset)))
    scores, labels, views = [], [], torch.empty(0)
    with progress_bar(len(some), "swap", unit="video") as bar:
        for index in some.round().astype(int).tolist():
            video = dataset[index]
            assert isinstance(video, VideoViews)  # of a dataset in test mode
            bar.update()
            if video.views is None:
                notes.append(f"not counted: {video.path}: {video.error}")
                continue
            views = video.views
            scores.append([score_views(m.network, views, m.cfg).numpy() for m in models.values()])
            labels.append(video.label)
    if not labels:
        raise RunError(f"none of the {len(some)} test videos could be read")
    return np.stack(scores, axis=1), np.array(labels), views[: views_at_a_time(cfg)]


def _view_times(models: Mapping[Choice, TrainedModel], views: Tensor) -> dict[Choice, float]:
    """Seconds of a view, in batches as in the test."""
    jobs = {
        str(number): partial(view_outputs, model.network, views, model.cfg)
        for number, model in enumerate(models.values())
    }
    seconds = best_times(jobs, REPEATS)
    return {choice: seconds[str(number)] / len(views) for number, choice in enumerate(models)}
