"""Study of the number of landmarks or groups: cost, error and accuracy of each attention.

Each attention replaces exact attention in models that were trained with exact attention, one model
per seed. Nothing is trained further.

PREFIX.csv is reproducible: the same command writes the same bytes. PREFIX_costs.csv has times,
which vary.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from slowfast_lara.analysis.measure import best_times
from slowfast_lara.analysis.model_errors import SettingError, measure_settings
from slowfast_lara.analysis.settings import Setting, has_landmarks
from slowfast_lara.analysis.swap import test_models
from slowfast_lara.analysis.tables import Cells, csv_text
from slowfast_lara.data.lists import read_path_labels
from slowfast_lara.drawing import attention_styles, saved_figure
from slowfast_lara.files import write_text
from slowfast_lara.inference.layers import layer_inputs, middle_view
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import chosen_estimator, estimator_settings
from studies.results import StudyResults, mean_and_std, shown_difference
from studies.rows import StudyTable
from studies.runs import StudyRun

# Number of test videos on which the errors of each model are measured.
ERROR_VIDEOS = 16


class LandmarkResult(NamedTuple):
    """One attention with one number of landmarks; lists have one entry per seed."""

    label: str
    landmarks: int | None
    macs: float  # of the spatial stage of a layer, for one clip
    errors: list[float]
    moving_errors: list[float]
    accuracies: list[float]  # top-1, %
    same: list[float]  # videos with the same top-1 class as with exact attention, %

    @property
    def error(self) -> float:
        return statistics.fmean(self.errors)


@dataclass
class LandmarkResults(StudyResults):
    """Results of all rows; the first row is exact attention."""

    results: Sequence[LandmarkResult]
    milliseconds: Sequence[float]  # one per result
    seeds: Sequence[int]

    def head(self) -> list[str]:
        meaning = (
            f"Seeds {', '.join(map(str, self.seeds))}: mean and standard deviation; differences "
            "are paired by seed, mean and standard error. Error: squared error divided by the "
            "square of exact attention's output; moving error: the same, with tokens weighted by "
            "the change of their pixels. MACs and forward time are for the spatial stage of one "
            "layer, one clip, one thread. Same: videos with the same top-1 class as with exact "
            "attention."
        )
        return [*super().head(), meaning]

    def cells(self) -> Cells:
        titles = ["attention", "landmarks", "MACs, M", "ms", "error", "moving error"]
        rows = [[*titles, "same, %", "top-1, %", "minus exact"]]
        for result, ms in zip(self.results, self.milliseconds):
            cells = [result.label, str(result.landmarks or "")]
            cells += [f"{result.macs / 1e6:.2f}", f"{ms:.2f}"]
            cells += [_error_text(errors) for errors in (result.errors, result.moving_errors)]
            cells += [mean_and_std(result.same), mean_and_std(result.accuracies)]
            rows.append([*cells, shown_difference(result, self.results[0])])
        return rows

    def csv_cells(self) -> Cells:
        titles: list[object] = ["attention", "landmarks", "macs"]
        kinds = ("error", "moving_error", "top1", "same")
        rows = [[*titles, *(f"{kind}_seed_{seed}" for kind in kinds for seed in self.seeds)]]
        for result in self.results:
            errors = (f"{x:.6f}" for x in (*result.errors, *result.moving_errors))
            shares = (f"{x:.3f}" for x in (*result.accuracies, *result.same))
            rows.append([result.label, result.landmarks or "", int(result.macs), *errors, *shares])
        return rows

    def write(self, path: str | os.PathLike[str]) -> None:
        super().write(path)
        costs = [
            [result.label, result.landmarks or "", f"{ms:.4f}"]
            for result, ms in zip(self.results, self.milliseconds)
        ]
        write_text(f"{path}_costs.csv", csv_text([["attention", "landmarks", "ms"], *costs]))

    def plot(self, path: str) -> None:
        results = self.results
        macs = [result.macs / 1e6 for result in results]
        exact = statistics.fmean(results[0].accuracies)
        with saved_figure(path, (16, 5), columns=3) as (figure, (error, by_macs, by_time)):
            labels = list(dict.fromkeys(result.label for result in results[1:]))
            for label, style in zip(labels, attention_styles(labels)):
                some = [i for i, result in enumerate(results) if result.label == label]
                error.plot(
                    [macs[i] for i in some], [results[i].error for i in some], **style, label=label
                )
                for axis, costs in ((by_macs, macs), (by_time, self.milliseconds)):
                    lost = [statistics.fmean(results[i].accuracies) - exact for i in some]
                    axis.plot([costs[i] for i in some], lost, **style, label=label)
            cost = "MACs of the spatial stage, millions"
            error.set(xscale="log", yscale="log", xlabel=cost, ylabel="relative squared error")
            by_macs.set(xscale="log", xlabel=cost, ylabel="top-1 minus exact attention, points")
            by_time.set(xlabel="time of the spatial stage, ms")
            by_time.legend(fontsize=8)
            figure.suptitle("attentions swapped into exact-attention models, without training")


def _error_text(errors: Sequence[float]) -> str:
    std = f" ± {statistics.stdev(errors):.2g}" if len(errors) > 1 and any(errors) else ""
    return f"{statistics.fmean(errors):.3g}{std}"


def write_landmarks(
    prefix: Path,
    table: StudyTable,
    runs: Sequence[StudyRun],
    seeds: Sequence[int],
    notes: Sequence[str],
) -> str:
    """Write all files of this part of the study; returns the table as Markdown."""
    torch.set_num_threads(1)  # as in the training runs
    by_seed = [[run for run in runs if run.seed == seed] for seed in seeds]
    figures = _collect(by_seed), _times(by_seed[0])
    results = LandmarkResults(table.title, *figures, seeds, notes=[*notes])
    results.write(prefix)
    return results.markdown()


def _setting(run: StudyRun) -> Setting:
    name = chosen_estimator(run.config)
    options = estimator_settings(run.config, name)
    number = options.pop("num_landmarks")
    return Setting(name, options, number if has_landmarks(name) else None)


def _collect(by_seed: Sequence[Sequence[StudyRun]]) -> list[LandmarkResult]:
    rows: list[list[tuple[SettingError, float, float]]] = []  # for each seed and run
    for runs in by_seed:
        model = _exact_model(runs)
        settings = [_setting(run) for run in runs]
        models = {index: _swapped(model, setting) for index, setting in enumerate(settings)}
        scores, labels, _ = test_models({"exact": model, **models}, None, [])
        guesses = scores.argmax(2)
        shares = (100 * (guesses[1:] == of).mean(1) for of in (labels, guesses[0]))
        # Random attentions use one seed here, because the study repeats all runs for several seeds.
        rows.append(list(zip(_errors(model, settings), *(x.tolist() for x in shares))))
    results = []
    for run, of_run in zip(by_seed[0], zip(*rows)):
        errors, accuracies, same = zip(*of_run)
        results.append(
            LandmarkResult(
                run.row.label,
                errors[0].setting.number,
                errors[0].macs,
                [row.error for row in errors],
                [row.moving_error for row in errors],
                list(accuracies),
                list(same),
            )
        )
    return results


def _exact_model(runs: Sequence[StudyRun]) -> TrainedModel:
    """The model with exact attention whose weights are the initial weights of these runs."""
    assert runs[0].initial_run  # set by plan()
    return load(str(runs[0].initial_run.folder))


def _swapped(model: TrainedModel, setting: Setting) -> TrainedModel:
    number = {} if setting.number is None else {"num_landmarks": setting.number}
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


def _errors(model: TrainedModel, settings: list[Setting]) -> list[SettingError]:
    layers = range(model.cfg.VIT.DEPTH)
    return measure_settings(model, settings, _test_videos(model), layers, 1, [])


@torch.no_grad()
def _times(runs: Sequence[StudyRun]) -> list[float]:
    """Forward time of each setting in ms; one process times all settings in turn."""
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
