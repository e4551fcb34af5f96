"""The result of a study: table, figures, learning curves and plot.

PREFIX.csv has the accuracies, parameters and GFLOPs: the same command writes the same bytes.
So it is with PREFIX_curves.csv, unless a run was interrupted: the first point after it went on
is the mean of fewer training steps. Times and memory, which differ from day to day, are in
PREFIX_costs.csv.
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

from slowfast_lara.analysis.measure import best_times, count_flops, peak_memory
from slowfast_lara.analysis.result_files import csv_text, markdown_table, measured_on
from slowfast_lara.data.lists import read_lines
from slowfast_lara.drawing import saved_figure
from slowfast_lara.files import write_text
from slowfast_lara.models import build_model
from slowfast_lara.runs.folder import RunRecord, read_run
from studies.study_rows import StudyRow, StudyTable
from studies.study_runs import StudyRun

# The rows from which the table tells every other row's difference, where it has them.
COMPARED_WITH = ("softmax", "lara", "mixed")


@dataclass
class Outcome:
    """One row over all seeds."""

    row: StudyRow
    accuracies: list[float]
    curves: list[dict[int, dict[str, float]]]  # for each seed, steps done -> values
    parameters: int
    gflops: float
    seconds: float  # of a training step
    memory: float  # bytes, of a training step

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


class OfSeeds(Protocol):
    """What has an accuracy for each seed."""

    @property
    def accuracies(self) -> list[float]: ...


def paired_difference(first: OfSeeds, second: OfSeeds) -> tuple[float, float]:
    """The mean of first - second, in points, and its standard error.

    Seed by seed: both started from the same weights and saw the same clips in the same order.
    """
    differences = [a - b for a, b in zip(first.accuracies, second.accuracies, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return statistics.fmean(differences), spread / math.sqrt(len(differences))


class _Step:
    """A training step of a run's model, without its data and optimiser."""

    def __init__(self, run: StudyRun) -> None:
        cfg = run.config
        torch.manual_seed(0)
        self.model = build_model(cfg)
        crop, frames = cfg.DATA.TRAIN_CROP_SIZE, cfg.DATA.NUM_FRAMES
        self.clips = torch.randn(cfg.TRAIN.BATCH_SIZE, 3, frames, crop, crop)
        self.labels = torch.zeros(len(self.clips), dtype=torch.long)

    def __call__(self) -> None:
        functional.cross_entropy(self.model([self.clips]), self.labels).backward()


def collect(runs: Sequence[StudyRun]) -> list[Outcome]:
    """The outcomes of finished runs, in the order of their rows."""
    by_row: dict[str, list[StudyRun]] = {}
    for run in runs:
        by_row.setdefault(run.row.name, []).append(run)
    torch.set_num_threads(1)  # as the runs had
    steps = {name: _Step(of_row[0]) for name, of_row in by_row.items()}
    # In turns in one process, while no run is going: only so can times be compared.
    seconds = best_times(steps, repeats=9)
    return [_outcome(of_row, steps[name], seconds[name]) for name, of_row in by_row.items()]


def _outcome(runs: list[StudyRun], step: _Step, seconds: float) -> Outcome:
    cfg = runs[0].config
    videos = read_lines(os.path.join(cfg.DATA.PATH_TO_DATA_DIR, "train.csv"))
    epoch_steps = sum(1 for _ in videos) // cfg.TRAIN.BATCH_SIZE
    memory = peak_memory(step)  # before the counter, which needs the model in eval mode
    return Outcome(
        row=runs[0].row,
        accuracies=[run.accuracy() for run in runs],
        curves=[_curve(read_run(str(run.folder), None), epoch_steps) for run in runs],
        parameters=sum(p.numel() for p in step.model.parameters() if p.requires_grad),
        gflops=count_flops(step.model.eval(), [step.clips[:1]]) / 1e9,
        seconds=seconds,
        memory=memory,
    )


def _curve(run: RunRecord, epoch_steps: int) -> dict[int, dict[str, float]]:
    """Loss and accuracies by steps done."""
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


def table_csv(table: StudyTable, outcomes: Sequence[Outcome], seeds: Sequence[int]) -> str:
    of_seeds, of_paper = (f"top1_seed_{s}" for s in seeds), (f"paper {c}" for c in table.columns)
    summary = ("top1_mean", "top1_std", "parameters", "gflops")
    lines: list[list[object]] = [["row", "attention", *of_seeds, *summary, *of_paper]]
    for o in outcomes:
        accuracies = (f"{x:.3f}" for x in (*o.accuracies, o.mean, o.spread))
        costs = (o.parameters, f"{o.gflops:.6f}")
        paper = o.row.paper or ("",) * len(table.columns)
        lines.append([o.row.name, o.row.label, *accuracies, *costs, *paper])
    return csv_text(lines)


def curves_csv(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> str:
    names = ("train_loss", "train_acc", "val_acc")
    lines: list[list[object]] = [["row", "seed", "step", *names]]
    for outcome in outcomes:
        for seed, curve in zip(seeds, outcome.curves):
            for step, point in sorted(curve.items()):
                values = (f"{point[name]:.4f}" if name in point else "" for name in names)
                lines.append([outcome.row.name, seed, step, *values])
    return csv_text(lines)


def costs_csv(outcomes: Sequence[Outcome]) -> str:
    lines = [["row", "step_ms", "peak_memory_mb"]]
    lines += [[o.row.name, f"{o.seconds * 1e3:.1f}", f"{o.memory / 2**20:.1f}"] for o in outcomes]
    return csv_text(lines)


def markdown(
    table: StudyTable, outcomes: Sequence[Outcome], seeds: Sequence[int], notes: Sequence[str]
) -> str:
    """The table for people; the paper's columns are of other data and far larger models."""
    paper = [f"paper: {column}, %" for column in table.columns]
    compared = [o for o in outcomes if o.row.name in COMPARED_WITH]
    against = [f"minus {o.row.label}" for o in compared]
    costs = ["parameters", "GFLOPs", "step, ms", "memory, MB"]
    rows = [["attention", "top-1, %", *against, *costs, *paper]]
    for o in outcomes:
        spread = f" ± {o.spread:.1f}" if len(o.accuracies) > 1 else ""
        cells = [o.row.label, f"{o.mean:.1f}{spread}", *(_minus(o, other) for other in compared)]
        cells += [f"{o.parameters / 1e3:.0f} k", f"{o.gflops:.4f}"]
        cells += [f"{o.seconds * 1e3:.0f}", f"{o.memory / 2**20:.0f}"]
        rows.append([*cells, *map(str, o.row.paper or [""] * len(paper))])
    meaning = (
        f"Mean and standard deviation over seeds {', '.join(map(str, seeds))}; differences of the "
        "same seed, their mean and its standard error. Time and memory (tensors) are of one "
        "training step, one thread. The paper's columns are the paper's figures, of its own data "
        "and models, not ours."
    )
    items = "\n".join(f"- {item}" for item in (*notes, measured_on(), meaning))
    title, rest = f"# {table.title}", (markdown_table(rows), agreement(table, outcomes))
    return "\n\n".join((title, items, *rest)) + "\n"


def _minus(outcome: Outcome, other: Outcome) -> str:
    if outcome is other:
        return ""
    difference, error = paired_difference(outcome, other)
    return f"{difference:+.1f}" + (f" ± {error:.1f}" if len(outcome.accuracies) > 1 else "")


def _paper_difference(first: Outcome, second: Outcome) -> float:
    """In the first of the paper's columns; 0 where a row is not the paper's."""
    return first.row.paper[0] - second.row.paper[0] if first.row.paper and second.row.paper else 0


def agreement(table: StudyTable, outcomes: Sequence[Outcome]) -> str:
    """How many pairs of rows stand in the paper's order, of those that differ in both."""
    # For each pair: whether it is clear.
    same: list[bool] = []
    against: list[bool] = []
    for first, second in combinations(outcomes, 2):
        (ours, error), theirs = paired_difference(first, second), _paper_difference(first, second)
        if ours * theirs:
            (same if ours * theirs > 0 else against).append(abs(ours) > 2 * error > 0)
    return (
        f"Pairs of rows in the paper's order ({table.columns[0]}): {len(same)}, of which "
        f"{sum(same)} are more than two standard errors apart. In the opposite order: "
        f"{len(against)}, of which {sum(against)} are."
    )


def plot(table: StudyTable, outcomes: Sequence[Outcome], path: str) -> None:
    with saved_figure(path, (15, 4.5), columns=3) as (figure, (ours, paper, curves)):
        for place, o in enumerate(outcomes):
            color = f"C{place}"
            ours.errorbar(o.mean, place, xerr=o.spread, fmt="o", color=color, capsize=3)
            ours.plot(o.accuracies, [place] * len(o.accuracies), "k.", markersize=4)
            paper.plot(o.row.paper[:1], [place] * len(o.row.paper[:1]), "o", color=color)
            line = "-" if place < 10 else "--"  # there are ten colours
            curves.plot(*_mean_curve(o), line, color=color)
        titles = "here, top-1 %: seeds, mean, deviation", f"paper, {table.columns[0]}, top-1 %"
        for axis, title in zip((ours, paper), titles):
            labels = [o.row.label if axis is ours else "" for o in outcomes]
            axis.set_yticks(range(len(outcomes)), labels)
            axis.invert_yaxis()
            axis.set_title(title)
        curves.set(title="top-1 % in training, mean of seeds", xlabel="step")
        figure.suptitle(table.title)


def _mean_curve(outcome: Outcome) -> tuple[list[int], list[float]]:
    """Steps, and the accuracy in training by then, where all seeds have one."""
    by_step: dict[int, list[float]] = {}
    for curve in outcome.curves:
        for step, point in curve.items():
            if "train_acc" in point:
                by_step.setdefault(step, []).append(point["train_acc"])
    steps = [step for step in sorted(by_step) if len(by_step[step]) == len(outcome.curves)]
    return steps, [statistics.fmean(by_step[step]) for step in steps]


def write(
    prefix: Path,
    table: StudyTable,
    runs: Sequence[StudyRun],
    seeds: Sequence[int],
    notes: Sequence[str],
) -> str:
    """All files of a study, each written aside and renamed; the table."""
    outcomes = collect(runs)
    text = markdown(table, outcomes, seeds, notes)
    files = {
        ".md": text,
        ".csv": table_csv(table, outcomes, seeds),
        "_curves.csv": curves_csv(outcomes, seeds),
        "_costs.csv": costs_csv(outcomes),
    }
    for ending, content in files.items():
        write_text(f"{prefix}{ending}", content)
    plot(table, outcomes, f"{prefix}.png")
    return text
