"""Results of the attention study: Markdown table, CSV files and plot.

PREFIX.csv has the accuracies, parameters and GFLOPs. It is reproducible: the same command writes
the same bytes. PREFIX_curves.csv has the learning curves. It is reproducible unless a run was
interrupted: the first point after a resume is the mean of fewer training steps. PREFIX_costs.csv
has times and memory, which vary.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Protocol

import torch
from torch.nn import functional

from benchmarks.profiling import count_flops, peak_memory
from benchmarks.tables import MarkdownTable, markdown_table
from slowfast_lara.analysis.measure import best_times
from slowfast_lara.analysis.tables import Cells, csv_text
from slowfast_lara.data.lists import read_lines
from slowfast_lara.drawing import attention_styles, saved_figure
from slowfast_lara.files import write_text
from slowfast_lara.models import build_model
from slowfast_lara.runs.folder import RunRecord, read_run
from studies.rows import StudyRow, StudyTable
from studies.runs import StudyRun

# Reference rows: the table has one column of differences for each of these rows that it contains.
COMPARED_WITH = ("softmax", "merged", "lara", "mixed")


@dataclass
class RowResult:
    """Results of one row; accuracies and curves have one entry per seed."""

    row: StudyRow
    accuracies: list[float]
    curves: list[dict[int, dict[str, float]]]  # training step -> metric -> value
    parameters: int
    gflops: float
    seconds: float  # of a training step
    memory: float  # bytes, of a training step

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


class HasAccuracies(Protocol):
    """A result with one accuracy per seed."""

    @property
    def accuracies(self) -> list[float]: ...


def paired_difference(first: HasAccuracies, second: HasAccuracies) -> tuple[float, float]:
    """Mean and standard error of first - second, in percentage points.

    The runs are paired by seed: runs of a seed have the same initial weights and order of clips.
    """
    differences = [a - b for a, b in zip(first.accuracies, second.accuracies, strict=True)]
    std = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return statistics.fmean(differences), std / math.sqrt(len(differences))


class _Step:
    """Forward and backward pass of a run's model on a random batch."""

    def __init__(self, run: StudyRun) -> None:
        cfg = run.config
        torch.manual_seed(0)
        self.model = build_model(cfg)
        crop, frames = cfg.DATA.TRAIN_CROP_SIZE, cfg.DATA.NUM_FRAMES
        self.clips = torch.randn(cfg.TRAIN.BATCH_SIZE, 3, frames, crop, crop)
        self.labels = torch.zeros(len(self.clips), dtype=torch.long)

    def __call__(self) -> None:
        functional.cross_entropy(self.model([self.clips]), self.labels).backward()


def collect(runs: Sequence[StudyRun]) -> list[RowResult]:
    """The results of finished runs, in the order of their rows."""
    by_row: dict[str, list[StudyRun]] = {}
    for run in runs:
        by_row.setdefault(run.row.name, []).append(run)
    torch.set_num_threads(1)  # as in the training runs
    steps = {name: _Step(of_row[0]) for name, of_row in by_row.items()}
    # Measure all times in this process, in turn, while no run is active: they are comparable.
    seconds = best_times(steps, repeats=9)
    return [_result(of_row, steps[name], seconds[name]) for name, of_row in by_row.items()]


def _result(runs: list[StudyRun], step: _Step, seconds: float) -> RowResult:
    cfg = runs[0].config
    videos = read_lines(os.path.join(cfg.DATA.PATH_TO_DATA_DIR, "train.csv"))
    epoch_steps = sum(1 for _ in videos) // cfg.TRAIN.BATCH_SIZE
    memory = peak_memory(step)  # before count_flops, which needs eval mode
    return RowResult(
        row=runs[0].row,
        accuracies=[run.accuracy() for run in runs],
        curves=[learning_curve(read_run(str(run.folder), None), epoch_steps) for run in runs],
        parameters=sum(p.numel() for p in step.model.parameters() if p.requires_grad),
        gflops=count_flops(step.model.eval(), [step.clips[:1]]) / 1e9,
        seconds=seconds,
        memory=memory,
    )


def learning_curve(run: RunRecord, epoch_steps: int) -> dict[int, dict[str, float]]:
    """Training loss, training accuracy and validation accuracy by training step."""
    curve: dict[int, dict[str, float]] = {}
    for name, kind, key in (
        ("train_loss", "train_iter", "loss"),
        ("train_acc", "train_iter", "top1_err"),
        ("val_acc", "val_epoch", "top1_err"),
    ):
        for epochs, value in run.curve(kind, key):
            point = curve.setdefault(round(epochs * epoch_steps), {})
            point[name] = value if key == "loss" else 100 - value
    return curve


def mean_and_std(values: Sequence[float]) -> str:
    """The mean, and the standard deviation if there are several values."""
    std = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{std}"


def shown_difference(result: HasAccuracies, other: HasAccuracies) -> str:
    """Mean ± standard error of `result` - `other`; empty if `result` is `other`."""
    if result is other:
        return ""
    difference, error = paired_difference(result, other)
    return f"{difference:+.1f}" + (f" ± {error:.1f}" if len(result.accuracies) > 1 else "")


def _paper_difference(first: RowResult, second: RowResult) -> float:
    """Difference in the paper's first column; 0 if the paper lacks one of the rows."""
    return first.row.paper[0] - second.row.paper[0] if first.row.paper and second.row.paper else 0


def agreement(table: StudyTable, results: Sequence[RowResult]) -> str:
    """Text: how many pairs of rows are in the paper's order, and how many in the opposite order."""
    # One entry per pair of rows: whether the difference exceeds two standard errors.
    same: list[bool] = []
    against: list[bool] = []
    for first, second in combinations(results, 2):
        (ours, error), theirs = paired_difference(first, second), _paper_difference(first, second)
        if ours * theirs:
            (same if ours * theirs > 0 else against).append(abs(ours) > 2 * error > 0)
    return (
        f"Pairs of rows in the paper's order ({table.columns[0]}): {len(same)}, of which "
        f"{sum(same)} differ by more than two standard errors. Pairs in the opposite order: "
        f"{len(against)}, of which {sum(against)} differ by more than two standard errors."
    )


@dataclass
class StudyResults(MarkdownTable):
    """Results of a study. The CSV file is reproducible: it has no header lines with the date."""

    def csv(self) -> str:
        return csv_text(self.csv_cells())


@dataclass
class AttentionResults(StudyResults):
    table: StudyTable
    results: Sequence[RowResult]
    seeds: Sequence[int]

    def head(self) -> list[str]:
        meaning = (
            f"Mean and standard deviation over seeds {', '.join(map(str, self.seeds))}; "
            "differences are paired by seed, mean and standard error. Time and memory (of tensors) "
            "are for one training step with one thread. The paper's columns are quoted from the "
            "paper, which uses other data and models."
        )
        return [*super().head(), meaning]

    def cells(self) -> Cells:
        paper = [f"paper: {column}, %" for column in self.table.columns]
        compared = [o for o in self.results if o.row.name in COMPARED_WITH]
        against = [f"minus {o.row.label}" for o in compared]
        costs = ["parameters", "GFLOPs", "step, ms", "memory, MB"]
        rows = [["attention", "top-1, %", *against, *costs, *paper]]
        for o in self.results:
            cells = [o.row.label, mean_and_std(o.accuracies)]
            cells += [shown_difference(o, other) for other in compared]
            cells += [f"{o.parameters / 1e3:.0f} k", f"{o.gflops:.4f}"]
            cells += [f"{o.seconds * 1e3:.0f}", f"{o.memory / 2**20:.0f}"]
            rows.append([*cells, *map(str, o.row.paper or [""] * len(paper))])
        return rows

    def csv_cells(self) -> Cells:
        of_seeds = (f"top1_seed_{seed}" for seed in self.seeds)
        of_paper = (f"paper {column}" for column in self.table.columns)
        summary = ("top1_mean", "top1_std", "parameters", "gflops")
        rows: list[list[object]] = [["row", "attention", *of_seeds, *summary, *of_paper]]
        for o in self.results:
            accuracies = (f"{x:.3f}" for x in (*o.accuracies, o.mean, o.std))
            costs = (o.parameters, f"{o.gflops:.6f}")
            paper = o.row.paper or ("",) * len(self.table.columns)
            rows.append([o.row.name, o.row.label, *accuracies, *costs, *paper])
        return rows

    def footer(self) -> list[str]:
        labels = [o.row.label for o in self.results]
        pairs = [
            [o.row.label, *(shown_difference(o, other) for other in self.results)]
            for o in self.results
        ]
        return [
            agreement(self.table, self.results),
            "Top-1 of the row minus top-1 of the column, in points, paired by seed:",
            markdown_table([["attention", *labels], *pairs]),
        ]

    def curves_csv(self) -> str:
        names = ("train_loss", "train_acc", "val_acc")
        rows: list[list[object]] = [["row", "seed", "step", *names]]
        for result in self.results:
            for seed, curve in zip(self.seeds, result.curves):
                for step, point in sorted(curve.items()):
                    values = (f"{point[name]:.4f}" if name in point else "" for name in names)
                    rows.append([result.row.name, seed, step, *values])
        return csv_text(rows)

    def costs_csv(self) -> str:
        rows = [
            [o.row.name, f"{o.seconds * 1e3:.1f}", f"{o.memory / 2**20:.1f}"] for o in self.results
        ]
        return csv_text([["row", "step_ms", "peak_memory_mb"], *rows])

    def write(self, path: str | os.PathLike[str]) -> None:
        super().write(path)
        write_text(f"{path}_curves.csv", self.curves_csv())
        write_text(f"{path}_costs.csv", self.costs_csv())

    def plot(self, path: str) -> None:
        with saved_figure(path, (15, 4.5), columns=3) as (figure, (ours, paper, curves)):
            names = [
                "lara-recommended" if o.row.name == "lara_best" else o.row.opts[1]
                for o in self.results
            ]
            for index, (o, style) in enumerate(zip(self.results, attention_styles(names))):
                color = style["color"]
                ours.errorbar(o.mean, index, xerr=o.std, fmt="o", color=color, capsize=3)
                ours.plot(o.accuracies, [index] * len(o.accuracies), "k.", markersize=4)
                paper.plot(o.row.paper[:1], [index] * len(o.row.paper[:1]), "o", color=color)
                curves.plot(*_mean_curve(o), color=color, ls=style["ls"])
            titles = (
                "here, top-1 %: seeds, mean, standard deviation",
                f"paper, {self.table.columns[0]}, top-1 %",
            )
            for axis, title in zip((ours, paper), titles):
                labels = [o.row.label if axis is ours else "" for o in self.results]
                axis.set_yticks(range(len(self.results)), labels)
                axis.invert_yaxis()
                axis.set_title(title)
            curves.set(title="top-1 % in training, mean over seeds", xlabel="step")
            figure.suptitle(self.title)


def _mean_curve(result: RowResult) -> tuple[list[int], list[float]]:
    """Steps that all seeds have logged, and the mean training accuracy at each."""
    by_step: dict[int, list[float]] = {}
    for curve in result.curves:
        for step, point in curve.items():
            if "train_acc" in point:
                by_step.setdefault(step, []).append(point["train_acc"])
    steps = [step for step in sorted(by_step) if len(by_step[step]) == len(result.curves)]
    return steps, [statistics.fmean(by_step[step]) for step in steps]


def write(
    prefix: Path,
    table: StudyTable,
    runs: Sequence[StudyRun],
    seeds: Sequence[int],
    notes: Sequence[str],
) -> str:
    """Write all files of a study; returns the table as Markdown."""
    results = AttentionResults(table.title, table, collect(runs), seeds, notes=[*notes])
    results.write(prefix)
    return results.markdown()
