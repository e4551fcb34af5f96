"""Fine-tuning on few clips: the plain recipe, the recommended one, and what each part of it does.

One small model is trained on eight motions and fine-tuned, as a user would a Kinetics model, on
few clips of twelve: with another object in the picture and four motions that it has not seen. Each
seed has clips of its own, and all rows of a seed have the same ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slowfast_lara.analysis.result_files import (
    csv_text,
    markdown_table,
    mean_and_spread,
    measured_on,
)
from slowfast_lara.analysis.swap import test_models
from slowfast_lara.drawing import saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.files import write_text
from slowfast_lara.inference.load import load
from slowfast_lara.prepare.synthetic import SPLITS
from studies.study_results import paired_difference
from studies.study_rows import EXACT_FIRST, StudyRow
from studies.study_runs import StudyRun, make_set, run_all, study_run

PREFIX = "finetuning"
_LOOK = {"size": 64, "frames": 16}
# Classes of the sets, and their videos for validation and test.
_FIRST_SET = {"classes": 8, "val": 120, "test": 240, **_LOOK, "seed": 0}
_SECOND_SET = {"classes": 12, "val": 36, "test": 240, **_LOOK, "seed": 1}
# The part rows, which are many, have no more seeds than this.
MOST_PART_SEEDS = 3

# Ten times that of study/recipe, the plain row. All rates are twelve times those of K400/ and
# finetune/, as the model is a twelfth as wide.
_RATE = {"SOLVER.BASE_LR": "0.012"}
_MIXUP = {"MIXUP.ENABLE": "True", "MIXUP.PROB": "0.5"}
_LAYERS = {"SOLVER.LAYER_DECAY": "0.75"}
_AVERAGE = {"SOLVER.EMA_DECAY": "0.99"}
# What configs/finetune has besides the average: twice that rate, reached in an epoch, gradients
# that are clipped, and a validation after every epoch.
RECIPE_CLIPS, RECIPE_EPOCHS = 240, 8
_RECIPE = {
    "SOLVER.BASE_LR": "0.024",
    "SOLVER.WARMUP_EPOCHS": "1.0",
    "SOLVER.CLIP_GRAD": "1.0",
    "SOLVER.MAX_EPOCH": str(RECIPE_EPOCHS),
    "TRAIN.EVAL_PERIOD": "1",
}


def _row(name: str, label: str, *parts: dict[str, str]) -> StudyRow:
    opts = (word for part in parts for pair in part.items() for word in pair)
    return StudyRow(name, label, tuple(opts), ())


MAIN_ROWS = (
    _row("plain", "plain"),
    _row("rate", "plain, 10 times the rate", _RATE),
    _row("recipe", "recipe", _RECIPE, _AVERAGE),
)
PART_ROWS = (
    _row("mixup", "mixup and cutmix", _RATE, _MIXUP),
    _row("erasing", "random erasing", _RATE, {"DATA.RE_PROB": "0.25"}),
    _row("repeated", "repeated augmentation", _RATE, {"DATA.USE_REPEATED_AUG": "True"}),
    _row("layers", "layer-wise decay 0.75", _RATE, _LAYERS),
    _row("average", "average of the weights", _RATE, _AVERAGE),
    _row("grey_blur", "grey and blur", _RATE, {"DATA.GRAYSCALE": "True", "DATA.GAUSSIAN": "True"}),
)


class Cell(NamedTuple):
    """One row with one number of clips: accuracies in percent, by seed."""

    row: StudyRow
    clips: int
    accuracies: list[float]  # of the best checkpoint by validation, which docs/finetuning.md tests
    last: list[float]  # of the last checkpoint


def compare_recipes(
    *,
    clips: Sequence[int],
    rows: Sequence[str] | None,
    seeds: int,
    jobs: int,
    work: str,
    out: str,
    train: int,
    opts: Sequence[str],
) -> str:
    """Do the study, as the flags of `slowfast-lara compare-recipes` say; its table."""
    folder = Path(work).resolve()
    classes = _SECOND_SET["classes"]
    for number in clips:
        if number % classes:
            raise InputError(
                f"--clips is {number}; a multiple of the {classes} classes is expected"
            )
    runs = _plan(_chosen(rows), clips, seeds, folder, opts)
    make_set(folder / "first_set", {"train": train, **_FIRST_SET})
    make_set(folder / "second_set", {"train": max(clips) * seeds, **_SECOND_SET})
    for number in clips:
        for seed in range(seeds):
            _write_lists(folder, number, seed)
    run_all([run for of_clips in runs.values() for run in of_clips], jobs)
    words = ["--clips", *map(str, clips), *(["--rows", *rows] if rows else [])]
    words += ["--seeds", str(seeds), "--train", str(train), *(["--opts", *opts] if opts else [])]
    command = " ".join(["slowfast-lara compare-recipes", *words])
    return _write(Path(out) / PREFIX, _cells(runs), command)


def _chosen(names: Sequence[str] | None) -> list[StudyRow]:
    known = {row.name: row for row in (*MAIN_ROWS, *PART_ROWS)}
    for name in names or ():
        if name not in known:
            raise InputError(f"unknown row {name!r}; known: {', '.join(known)}")
    return [row for row in known.values() if not names or row.name in names]


def _plan(
    rows: Sequence[StudyRow], clips: Sequence[int], seeds: int, work: Path, opts: Sequence[str]
) -> dict[int, list[StudyRun]]:
    """The runs for each number of clips; the parts are tried with the first number alone."""
    data = ["DATA.PATH_TO_DATA_DIR", str(work / "first_set")]
    first = study_run("study/pretrain", EXACT_FIRST, 0, work, [*data, *opts])
    runs: dict[int, list[StudyRun]] = {number: [] for number in clips}
    for number in clips:
        for seed in range(seeds):
            lists = ["DATA.PATH_TO_DATA_DIR", str(_lists(work, number, seed))]
            prefix = ["DATA.PATH_PREFIX", str(work / "second_set")]
            keys = ["RNG_SEED", str(seed), *lists, *prefix, *opts]
            for row in rows:
                if row in MAIN_ROWS or (number == clips[0] and seed < MOST_PART_SEEDS):
                    place = work / f"{number}_clips"
                    more = [*_as_many_steps(number), *keys] if row.name == "recipe" else keys
                    runs[number].append(study_run("study/recipe", row, seed, place, more, first))
    return runs


def _as_many_steps(clips: int) -> list[str]:
    """The recipe's epochs for another number of clips, and how often one is validated."""
    times = RECIPE_CLIPS / clips
    epochs, period = max(1, round(RECIPE_EPOCHS * times)), max(1, round(times))
    return ["SOLVER.MAX_EPOCH", str(epochs), "TRAIN.EVAL_PERIOD", str(period)]


def _lists(work: Path, clips: int, seed: int) -> Path:
    return work / "lists" / f"{clips}_clips" / f"seed_{seed}"


def _write_lists(work: Path, clips: int, seed: int) -> None:
    """As many clips of each class, other ones for each seed; validation and test are the same."""
    for split in SPLITS:
        lines = (work / "second_set" / f"{split}.csv").read_text(encoding="utf-8").splitlines()
        if split == "train":
            by_class: dict[str, list[str]] = {}
            for line in lines:
                by_class.setdefault(line.rsplit(" ", 1)[1], []).append(line)
            share = clips // len(by_class)
            some = slice(seed * share, (seed + 1) * share)
            lines = [line for of_class in by_class.values() for line in of_class[some]]
        write_text(_lists(work, clips, seed) / f"{split}.csv", "\n".join(lines) + "\n")


def _cells(runs: dict[int, list[StudyRun]]) -> list[Cell]:
    best = _best_accuracies([run for of_clips in runs.values() for run in of_clips])
    cells = []
    for clips, of_clips in runs.items():
        for row in dict.fromkeys(run.row for run in of_clips):
            some = [run for run in of_clips if run.row == row]
            accuracies = [best[run.folder] for run in some]
            cells.append(Cell(row, clips, accuracies, [run.accuracy() for run in some]))
    return cells


def _best_accuracies(runs: Sequence[StudyRun]) -> dict[Path, float]:
    """Of each run's best checkpoint; each test video is read once for all of them."""
    models = {run.folder: load(str(run.folder)) for run in runs}
    scores, labels, _ = test_models(models, None, [])
    right = (scores.argmax(2) == labels).mean(1)
    return {folder: 100 * float(share) for folder, share in zip(models, right)}


def _write(prefix: Path, cells: Sequence[Cell], command: str) -> str:
    """All files of the study, each written aside and renamed; the table."""
    meaning = (
        "Top-1 of 240 test videos of 12 classes (chance 8.3 %), mean and standard deviation over "
        "seeds, which differ in the clips too: of best.pyth, chosen by 36 validation clips, and of "
        "the last checkpoint. Differences of the same seed in best.pyth, their mean and its "
        "standard error. The rows below the recipe are the second row with one more part."
    )
    items = "\n".join(f"- {item}" for item in (f"`{command}`", measured_on(), meaning))
    titles = ["row", "clips", "seeds", "best.pyth, %", "last, %", "minus plain", "minus the rate"]
    table = markdown_table([titles, *(_shown(cell, cells) for cell in cells)])
    text = f"# Recipes for few clips\n\n{items}\n\n{table}\n"
    write_text(f"{prefix}.md", text)
    lines: list[list[object]] = [["row", "clips", "seed", "top1_best", "top1_last"]]
    for cell in cells:
        for seed, (best, last) in enumerate(zip(cell.accuracies, cell.last)):
            lines.append([cell.row.name, cell.clips, seed, f"{best:.3f}", f"{last:.3f}"])
    write_text(f"{prefix}.csv", csv_text(lines))
    _plot(cells, f"{prefix}.png")
    return text


def _shown(cell: Cell, cells: Sequence[Cell]) -> list[str]:
    texts = [cell.row.label, str(cell.clips), str(len(cell.accuracies))]
    texts += [mean_and_spread(values) for values in (cell.accuracies, cell.last)]
    for name in ("plain", "rate"):
        found = [c for c in cells if c.row.name == name and c.clips == cell.clips and c is not cell]
        texts.append(_minus(cell, found[0]) if found else "")
    return texts


def _minus(cell: Cell, other: Cell) -> str:
    same_seeds = other._replace(accuracies=other.accuracies[: len(cell.accuracies)])
    difference, error = paired_difference(cell, same_seeds)
    return f"{difference:+.1f}" + (f" ± {error:.1f}" if len(cell.accuracies) > 1 else "")


def _plot(cells: Sequence[Cell], path: str) -> None:
    with saved_figure(path, (8, 0.4 * len(cells) + 1.5)) as (figure, (axis,)):
        for place, cell in enumerate(cells):
            mean = statistics.fmean(cell.accuracies)
            axis.plot(cell.accuracies, [place] * len(cell.accuracies), "k.", markersize=4)
            axis.plot(mean, place, "o", color=f"C{place}")
        axis.set_yticks(range(len(cells)), [f"{c.row.label}, {c.clips} clips" for c in cells])
        axis.invert_yaxis()
        axis.axvline(100 / 12, color="grey", linestyle=":")
        axis.set_xlabel("top-1 of best.pyth, %: seeds and mean; dotted: chance")
