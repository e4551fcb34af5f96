"""The study over the number of landmarks: what a setting costs, and what it gives.

For each attention and number of landmarks: its error and its accuracy in the weights that were
trained with exact attention, without any training (the swap), and its accuracy after fine-tuning.
PREFIX.csv is the same for the same command; times, which differ from day to day, are in
PREFIX_costs.csv.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from slowfast_lara.analysis.measure import best_times
from slowfast_lara.analysis.nearest_attention import Row, Setting, measure_settings
from slowfast_lara.analysis.result_files import (
    csv_text,
    markdown_table,
    mean_and_spread,
    measured_on,
)
from slowfast_lara.analysis.swap import test_models
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.data.lists import read_path_labels
from slowfast_lara.drawing import saved_figure
from slowfast_lara.files import write_text
from slowfast_lara.inference.layers import layer_inputs, middle_view
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import chosen_estimator, estimator_settings
from studies.study_rows import StudyTable
from studies.study_runs import StudyRun

# Errors are the mean over so many test videos, in each of the models.
ERROR_VIDEOS = 16


class Point(NamedTuple):
    """One attention with one number of landmarks, over all seeds."""

    label: str
    landmarks: int | None
    products: float  # of the spatial stage of a layer, for one clip
    error: float
    moving_error: float
    swapped: list[float]  # top-1, %
    trained: list[float]


def write_landmarks(
    prefix: Path,
    table: StudyTable,
    runs: Sequence[StudyRun],
    seeds: Sequence[int],
    notes: Sequence[str],
) -> str:
    """All files of this part of a study, each written aside and renamed; the table."""
    torch.set_num_threads(1)  # as the runs had
    by_seed = [[run for run in runs if run.seed == seed] for seed in seeds]
    points = _points(by_seed)
    milliseconds = _times(by_seed[0])
    head = [
        *notes,
        measured_on(),
        f"Over seeds {', '.join(map(str, seeds))}. Error: squared, as a share of exact attention's "
        "square, and with tokens weighed by how much they change (moving), in the weights of exact "
        "attention; products and forward time are of the spatial stage of one layer, one clip, "
        "one thread.",
    ]
    rows = [_cells(point, ms) for point, ms in zip(points, milliseconds)]
    titles = ["attention", "landmarks", "products, M", "ms", "error", "moving error"]
    titles += ["top-1 untrained, %", "top-1 fine-tuned, %"]
    items = "\n".join(f"- {line}" for line in head)
    text = f"# {table.title}\n\n{items}\n\n{markdown_table([titles, *rows])}\n"
    write_text(f"{prefix}.md", text)
    write_text(f"{prefix}.csv", _csv(points, seeds))
    costs = [[p.label, p.landmarks or "", f"{ms:.4f}"] for p, ms in zip(points, milliseconds)]
    write_text(f"{prefix}_costs.csv", csv_text([["attention", "landmarks", "ms"], *costs]))
    _plot(points, milliseconds, f"{prefix}.png")
    return text


def _setting(run: StudyRun) -> Setting:
    name = chosen_estimator(run.config)
    options = estimator_settings(run.config, name)
    number = options.pop("num_landmarks")
    has_landmarks = "num_landmarks" in inspect.signature(ESTIMATORS[name]).parameters
    return Setting(name, options, number if has_landmarks else None)


def _points(by_seed: Sequence[Sequence[StudyRun]]) -> list[Point]:
    swapped, errors = [], []
    for runs in by_seed:
        model = _exact_model(runs)
        settings = [_setting(run) for run in runs]
        models = {place: _swapped(model, setting) for place, setting in enumerate(settings)}
        scores, labels, _ = test_models(models, None, [])
        swapped.append((100 * (scores.argmax(2) == labels).mean(1)).tolist())
        # One draw of what is random: the seeds of the study are the repetitions.
        errors.append(_errors(model, settings))
    points = []
    for place, run in enumerate(by_seed[0]):
        rows = [of_seed[place] for of_seed in errors]
        points.append(
            Point(
                run.row.label,
                rows[0].setting.landmarks,
                rows[0].products,
                statistics.fmean(row.error for row in rows),
                statistics.fmean(row.moving_error for row in rows),
                [of_seed[place] for of_seed in swapped],
                [runs[place].accuracy() for runs in by_seed],
            )
        )
    return points


def _exact_model(runs: Sequence[StudyRun]) -> TrainedModel:
    """The model from whose weights all runs of a seed go on."""
    assert runs[0].after  # plan() makes them so
    return load(str(runs[0].after.folder))


def _swapped(model: TrainedModel, setting: Setting) -> TrainedModel:
    number = {} if setting.landmarks is None else {"num_landmarks": setting.landmarks}
    return model.with_attention(setting.name, **setting.options, **number)


def _test_videos(model: TrainedModel) -> list[str]:
    data = model.cfg.DATA
    paths, _ = read_path_labels(
        f"{data.PATH_TO_DATA_DIR}/test.csv",
        data.PATH_LABEL_SEPARATOR,
        model.cfg.MODEL.NUM_CLASSES,
        data.PATH_PREFIX,
    )
    return list(paths[:ERROR_VIDEOS])


def _errors(model: TrainedModel, settings: list[Setting]) -> list[Row]:
    layers = range(model.cfg.VIT.DEPTH)
    return measure_settings(model, lambda _: settings, _test_videos(model), layers, 1, [])


@torch.no_grad()
def _times(runs: Sequence[StudyRun]) -> list[float]:
    """Milliseconds of each setting, in turns in one process."""
    model = _exact_model(runs)
    view = middle_view(_test_videos(model)[0], model.cfg)
    (inputs,) = layer_inputs(model.network, view, model.cfg, [0])
    jobs = {
        run.row.name: partial(
            _setting(run).build(inputs, model.cfg, seed=0),
            *inputs[:3],
            num_frames=inputs.num_frames,
        )
        for run in runs
    }
    return [1e3 * seconds for seconds in best_times(jobs, repeats=20).values()]


def _cells(point: Point, ms: float) -> list[str]:
    return [
        point.label,
        str(point.landmarks or ""),
        f"{point.products / 1e6:.2f}",
        f"{ms:.2f}",
        f"{point.error:.3f}",
        f"{point.moving_error:.3f}",
        mean_and_spread(point.swapped),
        mean_and_spread(point.trained),
    ]


def _csv(points: Sequence[Point], seeds: Sequence[int]) -> str:
    titles: list[object] = ["attention", "landmarks", "products", "error", "moving_error"]
    titles += [f"{kind}_seed_{seed}" for kind in ("untrained", "finetuned") for seed in seeds]
    rows = [titles]
    for p in points:
        figures = (f"{x:.6f}" for x in (p.error, p.moving_error))
        accuracies = (f"{x:.3f}" for x in (*p.swapped, *p.trained))
        rows.append([p.label, p.landmarks or "", int(p.products), *figures, *accuracies])
    return csv_text(rows)


def _plot(points: Sequence[Point], milliseconds: Sequence[float], path: str) -> None:
    products = [point.products / 1e6 for point in points]
    with saved_figure(path, (16, 5), columns=3) as (figure, (error, by_products, by_time)):
        for place, label in enumerate(dict.fromkeys(point.label for point in points)):
            some = [i for i, point in enumerate(points) if point.label == label]
            color = f"C{place}"
            if points[some[0]].error > 0:  # not exact attention itself
                errors = [points[i].error for i in some]
                error.plot([products[i] for i in some], errors, "o-", color=color, label=label)
            for axis, costs in ((by_products, products), (by_time, milliseconds)):
                xs = [costs[i] for i in some]
                trained = [statistics.fmean(points[i].trained) for i in some]
                swapped = [statistics.fmean(points[i].swapped) for i in some]
                axis.plot(xs, trained, "o-", color=color, label=label)
                axis.plot(xs, swapped, "x:", color=color)
        cost = "products of the spatial stage, millions"
        error.set(xscale="log", yscale="log", xlabel=cost, ylabel="relative squared error")
        by_products.set(xscale="log", xlabel=cost, ylabel="top-1, %")
        by_time.set(xlabel="time of the spatial stage, ms", ylabel="top-1, %")
        by_time.legend(fontsize=8)
        figure.suptitle("o: fine-tuned, x: not trained; each curve over the number of landmarks")
