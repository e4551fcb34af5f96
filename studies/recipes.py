"""Study of fine-tuning on few clips: plain, with the recommended recipe, with single techniques.

One small model is pretrained on eight motions. Each row fine-tunes it on few clips of twelve
motions, as a user fine-tunes a Kinetics model. Four of the motions are new to the model, and every
video has a second object. The training clips differ between seeds, and are the same for all rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slowfast_lara.analysis.swap import test_models
from slowfast_lara.analysis.tables import Cells
from slowfast_lara.drawing import saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.files import write_text
from slowfast_lara.inference.load import load
from slowfast_lara.prepare.synthetic import SPLITS
from studies.results import StudyResults, mean_and_std, shown_difference
from studies.rows import EXACT_FIRST, StudyRow
from studies.runs import StudyRun, make_set, run_all, study_run

PREFIX = "finetuning"
MEANING = (
    "Top-1 on 240 test videos of 12 classes (chance 8.3 %), mean and standard deviation over "
    "seeds. Each seed has its own training clips. best.pyth is the best checkpoint on 36 "
    "validation clips; last is the last checkpoint. Differences compare best.pyth of the same "
    "seed: mean and standard error. Rows below the recipe add one technique to the second row."
)
_SIZE = {"size": 64, "frames": 16}
# Arguments of the synthetic sets for pretraining and for fine-tuning.
FIRST_SET = {"classes": 8, "val": 120, "test": 240, **_SIZE, "seed": 0}
SECOND_SET = {"classes": 12, "val": 36, "test": 240, **_SIZE, "seed": 1}
# Maximum number of seeds for PART_ROWS, to save time.
MOST_PART_SEEDS = 3

# Ten times the learning rate of the plain row (study/recipe). The models of configs/K400 and
# configs/finetune are twelve times as wide. Therefore the plain row has twelve times the learning
# rate of configs/K400, and the recipe row twelve times the learning rate of configs/finetune.
_RATE = {"SOLVER.BASE_LR": "0.012"}
_MIXUP = {"MIXUP.ENABLE": "True", "MIXUP.PROB": "0.5"}
_LAYERS = {"SOLVER.LAYER_DECAY": "0.75"}
_AVERAGE = {"SOLVER.EMA_DECAY": "0.99"}
# The settings of configs/finetune, except EMA weights (_AVERAGE): twice the learning rate of _RATE,
# one epoch of warm-up, clipped gradients, validation after every epoch. RECIPE_EPOCHS is the number
# of epochs with RECIPE_CLIPS clips.
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
    _row("layers", "layer-wise rate decay 0.75", _RATE, _LAYERS),
    _row("average", "EMA weights", _RATE, _AVERAGE),
    _row("grey_blur", "grey and blur", _RATE, {"DATA.GRAYSCALE": "True", "DATA.GAUSSIAN": "True"}),
)


class RecipeResult(NamedTuple):
    """Test accuracies, in percent, of one row with one number of clips; one entry per seed."""

    row: StudyRow
    clips: int
    accuracies: list[float]  # of the best checkpoint on the validation clips
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
    """Run `python -m studies recipes` with these flags; returns the table as Markdown."""
    folder = Path(work).resolve()
    classes = SECOND_SET["classes"]
    for number in clips:
        if number % classes:
            raise InputError(f"--clips is {number}; must be a multiple of the {classes} classes")
    runs = _plan(_selected_rows(rows), clips, seeds, folder, opts)
    make_set(folder / "first_set", {"train": train, **FIRST_SET})
    make_set(folder / "second_set", {"train": max(clips) * seeds, **SECOND_SET})
    for number in clips:
        for seed in range(seeds):
            write_lists(folder, number, seed)
    run_all([run for of_clips in runs.values() for run in of_clips], jobs)
    words = ["--clips", *map(str, clips), *(["--rows", *rows] if rows else [])]
    words += ["--seeds", str(seeds), "--train", str(train), *(["--opts", *opts] if opts else [])]
    command = " ".join(["python -m studies recipes", *words])
    notes = [f"`{command}`", MEANING]
    results = RecipeResults("Recipes for few clips", _collect(runs), notes=notes)
    results.write(Path(out) / PREFIX)
    return results.markdown()


def _selected_rows(names: Sequence[str] | None) -> list[StudyRow]:
    known = {row.name: row for row in (*MAIN_ROWS, *PART_ROWS)}
    for name in names or ():
        if name not in known:
            raise InputError(f"--rows is {name!r}; must be one of {', '.join(known)}")
    return [row for row in known.values() if not names or row.name in names]


def _plan(
    rows: Sequence[StudyRow], clips: Sequence[int], seeds: int, work: Path, opts: Sequence[str]
) -> dict[int, list[StudyRun]]:
    """The runs for each number of clips; PART_ROWS run only with the first number."""
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
                    folder = work / f"{number}_clips"
                    more = [*_same_number_of_steps(number), *keys] if row.name == "recipe" else keys
                    runs[number].append(study_run("study/recipe", row, seed, folder, more, first))
    return runs


def _same_number_of_steps(clips: int) -> list[str]:
    """Overrides that give the recipe as many steps and validations as with RECIPE_CLIPS clips."""
    times = RECIPE_CLIPS / clips
    epochs, period = max(1, round(RECIPE_EPOCHS * times)), max(1, round(times))
    return ["SOLVER.MAX_EPOCH", str(epochs), "TRAIN.EVAL_PERIOD", str(period)]


def _lists(work: Path, clips: int, seed: int) -> Path:
    return work / "lists" / f"{clips}_clips" / f"seed_{seed}"


def write_lists(work: Path, clips: int, seed: int) -> None:
    """Write the lists of a seed: its class-balanced training clips, and all val and test clips."""
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


def _collect(runs: dict[int, list[StudyRun]]) -> list[RecipeResult]:
    best = _best_accuracies([run for of_clips in runs.values() for run in of_clips])
    results = []
    for clips, of_clips in runs.items():
        for row in dict.fromkeys(run.row for run in of_clips):
            some = [run for run in of_clips if run.row == row]
            accuracies = [best[run.folder] for run in some]
            last = [run.accuracy() for run in some]
            results.append(RecipeResult(row, clips, accuracies, last))
    return results


def _best_accuracies(runs: Sequence[StudyRun]) -> dict[Path, float]:
    """Test accuracy of each run's best checkpoint; decodes each test video once for all runs."""
    models = {run.folder: load(str(run.folder)) for run in runs}
    scores, labels, _ = test_models(models, None, [])
    right = (scores.argmax(2) == labels).mean(1)
    return {folder: 100 * float(share) for folder, share in zip(models, right)}


@dataclass
class RecipeResults(StudyResults):
    results: Sequence[RecipeResult]

    def cells(self) -> Cells:
        titles = ["row", "clips", "seeds", "best.pyth, %", "last, %"]
        rows = [[*titles, "minus plain", "minus the rate"]]
        return rows + [table_row(result, self.results) for result in self.results]

    def csv_cells(self) -> Cells:
        rows: list[list[object]] = [["row", "clips", "seed", "top1_best", "top1_last"]]
        for result in self.results:
            for seed, (best, last) in enumerate(zip(result.accuracies, result.last)):
                rows.append([result.row.name, result.clips, seed, f"{best:.3f}", f"{last:.3f}"])
        return rows

    def plot(self, path: str) -> None:
        results = self.results
        with saved_figure(path, (8, 0.4 * len(results) + 1.5)) as (figure, (axis,)):
            for index, result in enumerate(results):
                mean = statistics.fmean(result.accuracies)
                axis.plot(result.accuracies, [index] * len(result.accuracies), "k.", markersize=4)
                axis.plot(mean, index, "o", color=f"C{index}")
            axis.set_yticks(
                range(len(results)), [f"{r.row.label}, {r.clips} clips" for r in results]
            )
            axis.invert_yaxis()
            axis.axvline(100 / 12, color="grey", linestyle=":")
            axis.set_xlabel("top-1 of best.pyth, %; black: seeds, coloured: mean, dotted: chance")


def table_row(result: RecipeResult, results: Sequence[RecipeResult]) -> list[str]:
    """Cells of the Markdown table, with the differences from the rows `plain` and `rate`."""
    cells = [result.row.label, str(result.clips), str(len(result.accuracies))]
    cells += [mean_and_std(values) for values in (result.accuracies, result.last)]
    for name in ("plain", "rate"):
        other = [r for r in results if (r.row.name, r.clips) == (name, result.clips)]
        if not other or other[0] is result:
            cells.append("")
            continue
        same_seeds = other[0]._replace(accuracies=other[0].accuracies[: len(result.accuracies)])
        cells.append(shown_difference(result, same_seeds))
    return cells
