"""Fine-tuning on real videos, cross-validated: `python -m studies videos MODEL FOLDER ...`.

FOLDER has one folder of videos per class. MODEL is a Hugging Face folder of DINOv2 ViT-S/14. A
video model with exact trajectory attention starts from the image weights and learns motion on
synthetic videos (configs/finetune/dinov2_motions.yaml). The groups of videos (recording sessions,
`--group`) are divided into folds. In each fold:

- The model is trained on the videos of the other folds (configs/finetune/dinov2_cpu.yaml).
- Every other attention replaces exact attention in this model without training ("swapped").
- The rows in `--rows` are trained from the weights of this model for a quarter of the epochs
  ("fine-tuned"). Exact attention is one of them by default, so that the rows are comparable.
- Two linear classifiers are trained on frozen features of the image model: one on the features of
  one frame, the other on those of all frames in order.

Every video is tested once, by the model that was not trained on its group. The last checkpoint is
tested, so that no setting depends on a test video. A run needs a validation list; this list repeats
training videos.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slowfast_lara.analysis.swap import test_models
from slowfast_lara.analysis.tables import Cells
from slowfast_lara.data import load_views
from slowfast_lara.data.lists import read_path_labels
from slowfast_lara.drawing import attention_styles, saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.files import atomic_write, write_text
from slowfast_lara.inference.load import load
from slowfast_lara.prepare.lists import Split, classes_of, group_of
from slowfast_lara.progress import progress_bar
from studies.pretrained_models import load_image_model
from studies.results import StudyResults
from studies.rows import EXACT_FIRST, VIDEO, StudyRow
from studies.runs import StudyRun, make_set, run_all, study_run

MOTIONS = "finetune/dinov2_motions"  # config of the training on synthetic videos
CONFIG = "finetune/dinov2_cpu"  # config of all training runs on real videos
FINETUNE_SHARE = 4  # other attentions are fine-tuned for a quarter of the epochs of exact attention
MONITOR_SHARE = 8  # every eighth training video is also in val.csv
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # L2 penalties to try for the linear classifiers
PROBE_CROP, PROBE_FRAMES = 224, 8  # crop size and number of frames for the frozen features
CHOSEN_ROWS = ("softmax", "merged", "lara_best", "lara")  # fine-tuned by default


class VideoResult(NamedTuple):
    """Test results of one row over all folds: whether each video's top-1 class is correct."""

    label: str
    training: str  # "swapped", "fine-tuned", or "frozen" for the linear classifiers
    right: np.ndarray  # bool, [videos]
    fold: np.ndarray  # int, [videos]

    @property
    def accuracy(self) -> float:
        return 100 * float(self.right.mean())

    def fold_accuracies(self) -> list[float]:
        folds = np.unique(self.fold)
        return [100 * float(self.right[self.fold == fold].mean()) for fold in folds]

    def difference(self, other: VideoResult) -> tuple[float, float]:
        """Mean and standard error of the difference from another row, paired by video."""
        differences = 100.0 * (self.right.astype(float) - other.right)
        return float(differences.mean()), float(
            differences.std(ddof=1) / math.sqrt(len(self.right))
        )


@dataclass
class VideoResults(StudyResults):
    results: Sequence[VideoResult]
    classes: int

    def cells(self) -> Cells:
        exact = {
            result.training: result
            for result in self.results
            if result.label == VIDEO.rows[0].label
        }
        rows = [["attention", "training", "top-1, %", "folds, %", "minus exact"]]
        for result in self.results:
            base = exact.get(result.training, exact["swapped"])
            shown = "" if base is result else "{:+.1f} ± {:.1f}".format(*result.difference(base))
            folds = " ".join(f"{accuracy:.1f}" for accuracy in result.fold_accuracies())
            rows.append([result.label, result.training, f"{result.accuracy:.1f}", folds, shown])
        return rows

    def csv_cells(self) -> Cells:
        folds = [f"fold_{fold}" for fold in np.unique(self.results[0].fold)]
        rows: list[list[object]] = [["attention", "training", "top1", *folds]]
        for result in self.results:
            accuracies = (f"{x:.3f}" for x in (result.accuracy, *result.fold_accuracies()))
            rows.append([result.label, result.training, *accuracies])
        return rows

    def plot(self, path: str) -> None:
        results = self.results
        with saved_figure(path, (8, 0.3 * len(results) + 1.5)) as (figure, (axis,)):
            for index, (result, style) in enumerate(
                zip(results, attention_styles([result.label for result in results]))
            ):
                axis.barh(index, result.accuracy, color=style["color"])
                folds = result.fold_accuracies()
                axis.plot(folds, [index] * len(folds), "k.", markersize=4)
            axis.set_yticks(range(len(results)), [f"{r.label}, {r.training}" for r in results])
            axis.invert_yaxis()
            axis.axvline(100 / self.classes, color="grey", linestyle=":")
            axis.set_xlabel("top-1, %; bars: all videos, points: folds, dotted: chance")
            figure.suptitle(self.title, fontsize=9)


def study_videos(
    *,
    model: str,
    videos: str,
    group: str,
    folds: int,
    motions: int,
    rows: Sequence[str] | None,
    jobs: int,
    work: str,
    out: str,
    opts: Sequence[str],
) -> str:
    """Run `python -m studies videos` with these flags; returns the table as Markdown."""
    folder = Path(work).resolve()
    known = {row.name: row for row in VIDEO.rows}
    rows = rows or CHOSEN_ROWS
    if unknown := set(rows) - known.keys():
        raise InputError(f"--rows has {min(unknown)!r}; must be among {', '.join(known)}")
    groups = video_groups(videos, group)
    classes = write_fold_lists(videos, groups, folds, folder / "lists")
    sizes = {"train": motions, "val": min(120, motions), "test": 12}
    make_set(folder / "data", {"classes": 12, "size": 128, **sizes, "seed": 1})
    weights = ["VIT.PRETRAINED_WEIGHTS", str(Path(model, "model.safetensors").resolve())]
    data = ["DATA.PATH_TO_DATA_DIR", str(folder / "data"), *weights, *opts]
    first = study_run(MOTIONS, EXACT_FIRST, 0, folder / "motions", data)
    common = ["MODEL.NUM_CLASSES", str(classes), *opts]
    exact, tuned = _plan(known, rows, folds, folder, common, first)
    run_all([*exact, *tuned], jobs)
    features = _frame_features(model, groups, folder / "features.npz")
    results = _baselines(features, exact, groups) + _tested(exact, VIDEO.rows, "swapped")
    for name in rows:
        of_row = [run for run in tuned if run.row.name == name]
        results += _tested(of_row, [known[name]], "fine-tuned")
    names = f"--group {shlex.quote(group)} --folds {folds} --rows {' '.join(rows)}"
    notes = [
        f"`python -m studies videos {Path(model).name} {Path(videos).name} {names}`",
        f"Top-1 of {len(results[0].right)} videos of {classes} classes. Each video is tested once, "
        f"in one of {folds} folds; differences are paired by video, mean and standard error.",
    ]
    table = VideoResults(f"Fine-tuning on {Path(videos).name}", results, classes, notes=notes)
    table.write(Path(out) / "videos")
    return table.markdown()


def video_groups(videos: str, group: str) -> dict[str, str]:
    """The group of each video, in the order of the classes."""
    paths = [path for of_class in classes_of(videos).values() for path in of_class]
    return {str(Path(path).resolve()): group_of(path, videos, Split(group=group)) for path in paths}


def write_fold_lists(videos: str, groups: Mapping[str, str], folds: int, out: Path) -> int:
    """Write the lists OUT/fold_K/{train,val,test}.csv; returns the number of classes.

    The groups are sorted by name and assigned to the folds round-robin.
    """
    names = sorted(set(groups.values()))
    if len(names) < folds:
        raise InputError(f"{videos} has {len(names)} groups; expected at least {folds} (--folds)")
    classes = classes_of(videos)
    for fold in range(folds):
        test_groups = set(names[fold::folds])
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for label, paths in enumerate(classes.values()):
            for path in (str(Path(path).resolve()) for path in paths):
                part = "test" if groups[path] in test_groups else "train"
                lines[part].append(f"{path} {label}\n")
        lines["val"] = lines["train"][::MONITOR_SHARE]
        for part, content in lines.items():
            write_text(out / f"fold_{fold}" / f"{part}.csv", "".join(content))
    return len(classes)


def _plan(
    known: dict[str, StudyRow],
    rows: Sequence[str],
    folds: int,
    work: Path,
    common: Sequence[str],
    first: StudyRun,
) -> tuple[list[StudyRun], list[StudyRun]]:
    """The runs with exact attention, one per fold, and the fine-tuned runs of all rows."""
    exact, tuned = [], []
    for fold in range(folds):
        opts = ["DATA.PATH_TO_DATA_DIR", str(work / "lists" / f"fold_{fold}"), *common]
        exact.append(study_run(CONFIG, EXACT_FIRST, fold, work, opts, first))
        epochs = max(1, exact[0].config.SOLVER.MAX_EPOCH // FINETUNE_SHARE)
        opts += ["SOLVER.MAX_EPOCH", str(epochs)]
        tuned += [
            study_run(CONFIG, known[row], fold, work / "finetune", opts, exact[-1]) for row in rows
        ]
    return exact, tuned


def _baselines(
    features: Mapping[str, Tensor], runs: Sequence[StudyRun], groups: Mapping[str, str]
) -> list[VideoResult]:
    """Linear classifiers on frozen features of the image model, trained and tested in each fold."""
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "one frame": lambda x: x[PROBE_FRAMES // 2],  # [T,D] -> [D]
        "all frames in order": lambda x: x.flatten(),
    }
    results = []
    for name, choose in kinds.items():
        right: list[bool] = []
        fold: list[int] = []
        for run in runs:
            train, test = (_listed(run, part) for part in ("train", "test"))
            inputs = [torch.stack([choose(features[path]) for path in x]) for x in (train, test)]
            labels = [torch.tensor([*x.values()]) for x in (train, test)]
            found = linear_probe(inputs[0], labels[0], inputs[1], [groups[path] for path in train])
            right += (found == labels[1]).tolist()
            fold += [run.seed] * len(test)
        results.append(VideoResult(f"linear, {name}", "frozen", np.array(right), np.array(fold)))
    return results


@torch.no_grad()
def _frame_features(model: str, paths: Iterable[str], cache: Path) -> dict[str, Tensor]:
    """CLS and the mean of the patches, [T,2D], of frames spread over each video.

    The features are stored in `cache`, so that a resumed study does not compute them again.
    """
    torch.set_num_threads(1)
    if cache.is_file():
        with np.load(cache) as stored:
            return dict(zip(stored["paths"].tolist(), torch.from_numpy(stored["features"])))
    network, cfg = load_image_model(model, PROBE_CROP, PROBE_FRAMES)
    cfg.TEST.DATASET = "ssv2"
    features = {}
    with progress_bar(len([*paths]), "frozen features", unit="video") as bar:
        for path in paths:
            tokens = network(load_views(path, cfg)[0].transpose(0, 1)).last_hidden_state
            features[path] = torch.cat((tokens[:, 0], tokens[:, 1:].mean(1)), dim=1)
            bar.update()
    with atomic_write(cache) as path, open(path, "wb") as file:
        np.savez(file, paths=[*features], features=torch.stack([*features.values()]).numpy())
    return features


def linear_probe(x: Tensor, labels: Tensor, test: Tensor, groups: Sequence[str]) -> Tensor:
    """Predict the classes of `test` by logistic regression on x [N,D].

    The L2 penalty is chosen on a third of the groups, held out; the final fit uses all of x.
    """
    mean, std = x.mean(0), x.std(0) + 1e-6
    x, test = (x - mean) / std, (test - mean) / std
    names = sorted(set(groups))
    held_out = torch.tensor([names.index(name) % 3 == 0 for name in groups])

    def accuracy(penalty: float) -> float:
        found = _fit(x[~held_out], labels[~held_out], penalty, int(labels.max()) + 1)(x[held_out])
        return float((found == labels[held_out]).float().mean())

    best = max(PENALTIES, key=accuracy)
    return _fit(x, labels, best, int(labels.max()) + 1)(test)


def _fit(x: Tensor, labels: Tensor, penalty: float, classes: int) -> Callable[[Tensor], Tensor]:
    """Logistic regression with an L2 penalty; returns the function from features to classes."""
    weight = torch.zeros(x.shape[1], classes, requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (
            functional.cross_entropy(x @ weight + bias, labels) + penalty * weight.square().sum()
        )
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return lambda inputs: (inputs @ weight + bias).argmax(1)


def _listed(run: StudyRun, part: str) -> dict[str, int]:
    """Paths and labels of one list of a run."""
    path = str(Path(run.config.DATA.PATH_TO_DATA_DIR, f"{part}.csv"))
    paths, labels = read_path_labels(path, " ", run.config.MODEL.NUM_CLASSES, "")
    return {path: int(label) for path, label in zip(paths, labels) if not isinstance(label, tuple)}


def _tested(runs: Sequence[StudyRun], rows: Sequence[StudyRow], training: str) -> list[VideoResult]:
    """Test one run per fold with the attention of each row."""
    right: dict[str, list[bool]] = {row.label: [] for row in rows}
    fold: list[int] = []
    for run in runs:
        models = {row.label: load(run.weights(), overrides=row.opts) for row in rows}
        scores, labels, _ = test_models(models, None, [])
        fold += [run.seed] * len(labels)
        for label, found in zip(models, scores.argmax(2) == labels):
            right[label] += found.tolist()
    return [
        VideoResult(label, training, np.array(found), np.array(fold))
        for label, found in right.items()
    ]
