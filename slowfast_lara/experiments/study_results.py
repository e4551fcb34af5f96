"""The result of a study: table, figures, learning curves and plot.

What depends on the seeds alone goes into PREFIX.csv: the same command writes the same
bytes. So it is with PREFIX_curves.csv, but for the training means of the steps in which a
run was interrupted, which are of their rest. Times and memory, which differ, are in
PREFIX_costs.csv.
"""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch.nn import functional

from slowfast_lara.config import load_config
from slowfast_lara.data.lists import read_lines
from slowfast_lara.engine.run_folder import read_stats
from slowfast_lara.experiments.measure import best_times, count_flops, environment, peak_memory
from slowfast_lara.experiments.study_rows import Row, Table
from slowfast_lara.experiments.study_runs import Run
from slowfast_lara.files import write_text, written_aside
from slowfast_lara.models import build_model


@dataclass
class Outcome:
    """One row over all seeds."""

    row: Row
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


class _Step:
    """A training step of a run's model, without its data and optimiser."""

    def __init__(self, run: Run) -> None:
        cfg = load_config(run.folder / "study.yaml")
        torch.manual_seed(0)
        self.model = build_model(cfg)
        crop, frames = cfg.DATA.TRAIN_CROP_SIZE, cfg.DATA.NUM_FRAMES
        self.clips = torch.randn(cfg.TRAIN.BATCH_SIZE, 3, frames, crop, crop)
        self.labels = torch.zeros(len(self.clips), dtype=torch.long)

    def __call__(self) -> None:
        functional.cross_entropy(self.model([self.clips]), self.labels).backward()


def collect(runs: Sequence[Run]) -> list[Outcome]:
    """The outcomes of finished runs, in the order of their rows."""
    by_row: dict[str, list[Run]] = {}
    for run in runs:
        by_row.setdefault(run.row.name, []).append(run)
    torch.set_num_threads(1)  # as the runs had
    steps = {name: _Step(of_row[0]) for name, of_row in by_row.items()}
    # One after another and not while others run: a ratio in one process is a figure.
    seconds = best_times(steps, repeats=9)
    return [_outcome(of_row, steps[name], seconds[name]) for name, of_row in by_row.items()]


def _outcome(runs: list[Run], step: _Step, seconds: float) -> Outcome:
    cfg = load_config(runs[0].folder / "study.yaml")
    videos = read_lines(os.path.join(cfg.DATA.PATH_TO_DATA_DIR, "train.csv"))
    epoch_steps = sum(1 for _ in videos) // cfg.TRAIN.BATCH_SIZE
    memory = peak_memory(step)
    return Outcome(
        row=runs[0].row,
        accuracies=[run.result()["top1_acc"] for run in runs],
        curves=[_curve(read_stats(run.folder), epoch_steps) for run in runs],
        parameters=sum(p.numel() for p in step.model.parameters() if p.requires_grad),
        gflops=count_flops(step.model.eval(), [step.clips[:1]]) / 1e9,
        seconds=seconds,
        memory=memory,
    )


def _curve(log: list[dict], epoch_steps: int) -> dict[int, dict[str, float]]:
    """Loss and accuracies by steps done; of steps done twice, the last."""
    curve: dict[int, dict[str, float]] = {}
    for entry in log:
        if entry.get("_type") == "train_iter":
            before = (int(entry["epoch"].split("/")[0]) - 1) * epoch_steps
            point = curve.setdefault(before + int(entry["iter"].split("/")[0]), {})
            point["train_loss"] = entry["loss"]
            point["train_acc"] = 100 - entry["top1_err"]
        if entry.get("_type") == "val_epoch":
            done = int(entry["epoch"].split("/")[0]) * epoch_steps
            curve.setdefault(done, {})["val_acc"] = 100 - entry["top1_err"]
    return curve


def table_csv(table: Table, outcomes: Sequence[Outcome], seeds: Sequence[int]) -> str:
    lines = [
        [
            "row",
            "attention",
            *(f"top1_seed_{seed}" for seed in seeds),
            "top1_mean",
            "top1_std",
            "parameters",
            "gflops",
            *(f"paper {column}" for column in table.columns),
        ]
    ]
    for outcome in outcomes:
        lines.append(
            [
                outcome.row.name,
                outcome.row.label,
                *(f"{x:.3f}" for x in outcome.accuracies),
                f"{outcome.mean:.3f}",
                f"{outcome.spread:.3f}",
                outcome.parameters,
                f"{outcome.gflops:.6f}",
                *outcome.row.paper,
            ]
        )
    return _csv(lines)


def curves_csv(outcomes: Sequence[Outcome], seeds: Sequence[int]) -> str:
    names = ("train_loss", "train_acc", "val_acc")
    lines = [["row", "seed", "step", *names]]
    for outcome in outcomes:
        for seed, curve in zip(seeds, outcome.curves):
            for step, point in sorted(curve.items()):
                values = (f"{point[name]:.4f}" if name in point else "" for name in names)
                lines.append([outcome.row.name, seed, step, *values])
    return _csv(lines)


def costs_csv(outcomes: Sequence[Outcome]) -> str:
    lines = [["row", "step_ms", "peak_memory_mb"]]
    lines += [[o.row.name, f"{o.seconds * 1e3:.1f}", f"{o.memory / 2**20:.1f}"] for o in outcomes]
    return _csv(lines)


def _csv(lines: list[list[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def markdown(
    table: Table, outcomes: Sequence[Outcome], seeds: Sequence[int], notes: Sequence[str]
) -> str:
    """The table for people; the paper's columns are of other data and far larger models."""
    facts = ", ".join(f"{key} {value}" for key, value in environment().items())
    paper = [f"paper: {column}, %" for column in table.columns]
    head = ["attention", "top-1, %", "parameters", "GFLOPs", "step, ms", "memory, MB", *paper]
    lines = [
        f"# {table.title}",
        "",
        *(f"- {note}" for note in notes),
        f"- {facts}",
        f"- Mean and standard deviation over seeds {', '.join(map(str, seeds))}. Time and "
        "memory (tensors) are of one training step, one thread. The paper's columns are the "
        "paper's figures, of its own data and models, not ours.",
        "",
        _line(head),
        _line(["---"] * len(head)),
    ]
    for o in outcomes:
        lines.append(
            _line(
                [
                    o.row.label,
                    _with_spread(o),
                    f"{o.parameters / 1e3:.0f} k",
                    f"{o.gflops:.4f}",
                    f"{o.seconds * 1e3:.0f}",
                    f"{o.memory / 2**20:.0f}",
                    *map(str, o.row.paper),
                ]
            )
        )
    lines += ["", agreement(table, outcomes)]
    return "\n".join(lines) + "\n"


def _with_spread(outcome: Outcome) -> str:
    if len(outcome.accuracies) < 2:
        return f"{outcome.mean:.1f}"
    return f"{outcome.mean:.1f} ± {outcome.spread:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def agreement(table: Table, outcomes: Sequence[Outcome]) -> str:
    """How many pairs of rows stand in the paper's order, of those that differ in both."""
    same, against = [], []
    for first, second in combinations(outcomes, 2):
        ours, theirs = first.mean - second.mean, first.row.paper[0] - second.row.paper[0]
        error = math.hypot(first.spread, second.spread) / math.sqrt(len(first.accuracies))
        if ours * theirs:
            (same if ours * theirs > 0 else against).append(abs(ours) > 2 * error > 0)
    return (
        f"Pairs of rows in the paper's order ({table.columns[0]}): {len(same)}, of which "
        f"{sum(same)} are more than two standard errors apart. In the opposite order: "
        f"{len(against)}, of which {sum(against)} are."
    )


def plot(table: Table, outcomes: Sequence[Outcome], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ours, paper, curves) = pyplot.subplots(
        1, 3, figsize=(15, 4.5), constrained_layout=True
    )
    for place, o in enumerate(outcomes):
        color = f"C{place}"
        ours.errorbar(o.mean, place, xerr=o.spread, fmt="o", color=color, capsize=3)
        ours.plot(o.accuracies, [place] * len(o.accuracies), "k.", markersize=4)
        paper.plot(o.row.paper[0], place, "o", color=color)
        curves.plot(*_mean_curve(o), color=color)
    titles = "here, top-1 %: seeds, mean, deviation", f"paper, {table.columns[0]}, top-1 %"
    for axis, title in zip((ours, paper), titles):
        axis.set_yticks(range(len(outcomes)), [o.row.label for o in outcomes if axis is ours])
        axis.invert_yaxis()
        axis.set_title(title)
    curves.set(title="here, top-1 % in training, mean of seeds", xlabel="step")
    for axis in (ours, paper, curves):
        axis.grid(alpha=0.3)
    figure.suptitle(table.title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


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
    table: Table,
    outcomes: Sequence[Outcome],
    seeds: Sequence[int],
    notes: Sequence[str],
) -> str:
    """All files of a study, each written aside and renamed; the table."""
    text = markdown(table, outcomes, seeds, notes)
    files = {
        ".md": text,
        ".csv": table_csv(table, outcomes, seeds),
        "_curves.csv": curves_csv(outcomes, seeds),
        "_costs.csv": costs_csv(outcomes),
    }
    for ending, content in files.items():
        write_text(f"{prefix}{ending}", content)
    with written_aside(f"{prefix}.png") as aside:
        plot(table, outcomes, aside)
    return text
