"""Study of the number of landmarks: cost, error and accuracy of each attention.

Each attention replaces exact attention in a model that was trained with exact attention. The study
measures error and accuracy without further training (swap), and accuracy after fine-tuning.

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
from slowfast_lara.analysis.model_errors import SettingError, has_landmarks, measure_settings
from slowfast_lara.analysis.settings import Setting
from slowfast_lara.analysis.swap import test_models
from slowfast_lara.analysis.tables import Cells, csv_text
from slowfast_lara.data.lists import read_path_labels
from slowfast_lara.drawing import saved_figure
from slowfast_lara.files import write_text
from slowfast_lara.inference.layers import layer_inputs, middle_view
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import chosen_estimator, estimator_settings
from studies.results import StudyResults, mean_and_std
from studies.rows import StudyTable
from studies.runs import StudyRun

# Number of test videos on which the errors of each model are measured.
ERROR_VIDEOS = 16


class LandmarkResult(NamedTuple):
    """One attention with one number of landmarks; errors (model_errors.py) are means over seeds."""

    label: str
    landmarks: int | None
    macs: float  # of the spatial stage of a layer, for one clip
    error: float
    moving_error: float
    swapped: list[float]  # top-1 by seed, without fine-tuning, %
    trained: list[float]  # top-1 by seed, after fine-tuning, %


@dataclass
class LandmarkResults(StudyResults):
    results: Sequence[LandmarkResult]
    milliseconds: Sequence[float]  # one per result
    seeds: Sequence[int]

    def head(self) -> list[str]:
        meaning = (
            f"Seeds {', '.join(map(str, self.seeds))}. Error: squared error divided by the square "
            "of exact attention's output, before fine-tuning; moving error: the same, with tokens "
            "weighted by the change of their pixels. MACs and forward time are for the spatial "
            "stage of one layer, one clip, one thread."
        )
        return [*super().head(), meaning]

    def cells(self) -> Cells:
        titles = ["attention", "landmarks", "MACs, M", "ms", "error", "moving error"]
        rows = [[*titles, "top-1 untrained, %", "top-1 fine-tuned, %"]]
        for result, ms in zip(self.results, self.milliseconds):
            cells = [result.label, str(result.landmarks or "")]
            cells += [f"{result.macs / 1e6:.2f}", f"{ms:.2f}"]
            cells += [f"{error:.3f}" for error in (result.error, result.moving_error)]
            rows.append([*cells, *map(mean_and_std, (result.swapped, result.trained))])
        return rows

    def csv_cells(self) -> Cells:
        titles: list[object] = ["attention", "landmarks", "macs", "error", "moving_error"]
        kinds = ("untrained", "finetuned")
        rows = [[*titles, *(f"{kind}_seed_{seed}" for kind in kinds for seed in self.seeds)]]
        for result in self.results:
            errors = (f"{x:.6f}" for x in (result.error, result.moving_error))
            accuracies = (f"{x:.3f}" for x in (*result.swapped, *result.trained))
            number = result.landmarks or ""
            rows.append([result.label, number, int(result.macs), *errors, *accuracies])
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
        with saved_figure(path, (16, 5), columns=3) as (figure, (error, by_macs, by_time)):
            for index, label in enumerate(dict.fromkeys(result.label for result in results)):
                some = [i for i, result in enumerate(results) if result.label == label]
                color = f"C{index}"
                if results[some[0]].error > 0:  # exact attention has no error
                    errors = [results[i].error for i in some]
                    error.plot([macs[i] for i in some], errors, "o-", color=color, label=label)
                for axis, costs in ((by_macs, macs), (by_time, self.milliseconds)):
                    xs = [costs[i] for i in some]
                    trained = [statistics.fmean(results[i].trained) for i in some]
                    swapped = [statistics.fmean(results[i].swapped) for i in some]
                    axis.plot(xs, trained, "o-", color=color, label=label)
                    axis.plot(xs, swapped, "x:", color=color)
            cost = "MACs of the spatial stage, millions"
            error.set(xscale="log", yscale="log", xlabel=cost, ylabel="relative squared error")
            by_macs.set(xscale="log", xlabel=cost, ylabel="top-1, %")
            by_time.set(xlabel="time of the spatial stage, ms", ylabel="top-1, %")
            by_time.legend(fontsize=8)
            figure.suptitle("o: fine-tuned, x: not fine-tuned; one point per number of landmarks")


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
    swapped, errors = [], []
    for runs in by_seed:
        model = _exact_model(runs)
        settings = [_setting(run) for run in runs]
        models = {index: _swapped(model, setting) for index, setting in enumerate(settings)}
        scores, labels, _ = test_models(models, None, [])
        swapped.append((100 * (scores.argmax(2) == labels).mean(1)).tolist())
        # Random attentions use one seed here, because the study repeats all runs for several seeds.
        errors.append(_errors(model, settings))
    results = []
    for index, run in enumerate(by_seed[0]):
        rows = [of_seed[index] for of_seed in errors]
        results.append(
            LandmarkResult(
                run.row.label,
                rows[0].setting.number,
                rows[0].macs,
                statistics.fmean(row.error for row in rows),
                statistics.fmean(row.moving_error for row in rows),
                [of_seed[index] for of_seed in swapped],
                [runs[index].accuracy() for runs in by_seed],
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
    """Forward milliseconds of each setting; one process times all settings in turn."""
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
