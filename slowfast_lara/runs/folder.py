"""File names in a run's OUTPUT_DIR, and the record of a run read from these files."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from slowfast_lara.config.keys import get_value
from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.data.classes import class_names, numbered
from slowfast_lara.errors import DataError, InputError
from slowfast_lara.files import parse_json
from slowfast_lara.labels import Label
from slowfast_lara.runs import checkpoint

# File names in OUTPUT_DIR; checkpoints are in checkpoints/ (see `checkpoint`). Training writes
# CONFIG and ENVIRONMENT; a test writes the same files with the prefix TEST_PREFIX.
LOG = "stdout.log"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
TEST_PREFIX = "test_"
TEST_RESULTS = "test_results.json"
MAX_CLASSES = 10_000  # limits the memory of the confusion matrix, [classes, classes]

# Metrics of a test, in percent: key in TEST_RESULTS and in the log -> display name.
TEST_METRICS = {
    "top1_acc": "top-1 accuracy",
    "top5_acc": "top-5 accuracy",
    "action_top1_acc": "action top-1 accuracy",
    "action_top5_acc": "action top-5 accuracy",
    "verb_top1_acc": "verb top-1 accuracy",
    "noun_top1_acc": "noun top-1 accuracy",
    "map": "mean average precision",
}

# PySlowFast's `log_json_stats` writes this before the JSON object.
_JSON_MARK = "json_stats: "


class TestedVideo(NamedTuple):
    """Label of a tested video, its top 5 classes or actions, and their scores."""

    path: str
    label: Label
    top5: list[Label]
    scores: list[float]

    @property
    def correct(self) -> bool:
        return self.top5[0] == self.label


class ClassPrecision(NamedTuple):
    """Average precision of a class in percent, and its number of videos."""

    label: int
    percent: float
    num_videos: int


class FailedVideo(NamedTuple):
    path: str
    reason: str


@dataclass
class RunRecord:
    """Log, config, environment and test results of a run."""

    folder: str
    stats: list[dict[str, Any]]
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]
    names: list[str]
    videos: list[TestedVideo] = field(default_factory=list)
    failed: list[FailedVideo] = field(default_factory=list)
    checkpoint: str = ""
    metrics: dict[str, float] = field(default_factory=dict)  # keys as in TEST_METRICS, in percent
    # Only for (verb, noun) labels: {"verb": record of the verbs, "noun": record of the nouns}.
    parts: dict[str, RunRecord] = field(default_factory=dict)
    test_config: dict[str, Any] = field(default_factory=dict)
    # Only for multi-label videos.
    precisions: list[ClassPrecision] = field(default_factory=list)

    def name_of(self, label: Label) -> str:
        """The name of a class or of a (verb, noun) action."""
        if isinstance(label, int):
            return self.names[label]
        parts = zip(self.parts.values(), label)
        return " ".join(part.names[number] for part, number in parts)

    def setting(self, key: str, default: Any = None) -> Any:
        """Value of a dotted config key; `default` if the key is missing or None."""
        value = get_value(self.config, key, None)
        return default if value is None else value

    def tested(self, key: str) -> Any:
        """Value of a dotted config key in the last test, or in training without a test, or None."""
        return get_value(self.test_config or self.config, key, None)

    def stats_of(self, kind: str) -> list[dict[str, Any]]:
        """Logged stats whose type or split is `kind`, e.g. "train_epoch"."""
        return [line for line in self.stats if kind in (line.get("_type"), line.get("split"))]

    def curve(self, kind: str, key: str) -> list[tuple[float, float]]:
        """Sorted (epochs, value) pairs of a log key, without values that are not finite.

        If `epochs` repeats, the last value is used.
        """
        points = {}
        for line in self.stats_of(kind):
            epochs, value = _epochs(line), line.get(key)
            if epochs is not None and isinstance(value, (int, float)) and math.isfinite(value):
                points[epochs] = float(value)
        return sorted(points.items())

    def confusion(self) -> np.ndarray:
        """Confusion matrix [classes, classes]: number of videos by label and top-1 class."""
        matrix = np.zeros((len(self.names), len(self.names)), int)
        for video in self.videos:
            matrix[cast(int, video.label), cast(int, video.top5[0])] += 1
        return matrix


def read_run(folder: str, classes: str | None) -> RunRecord:
    """Read the record of a run; fields whose file is missing stay empty.

    `classes` is a file with the class names; if it is None, the names are looked up.
    """
    if not os.path.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    trained = os.path.isfile(os.path.join(folder, CONFIG))
    prefix = "" if trained else TEST_PREFIX
    names = (prefix + CONFIG, prefix + ENVIRONMENT, TEST_RESULTS)
    paths = [os.path.join(folder, name) for name in names]
    config_text, environment, results = map(_read, paths)
    stats = read_stats(folder)
    if not (stats or results):
        raise InputError(f"{folder}: not a run; expected {LOG} or {TEST_RESULTS} in it")
    config = parse_yaml(config_text, paths[0])
    run = RunRecord(folder, stats, config_text, config, json_object(environment, paths[1]), [])
    if results:
        _add_results(run, results, paths[2])
        test_config = os.path.join(folder, TEST_PREFIX + CONFIG)
        run.test_config = parse_yaml(_read(test_config), test_config)
    limits = {"TRAIN.BATCH_SIZE": 10**9, "NUM_SHARDS": 10**9, **dict.fromkeys(_COUNTS, MAX_CLASSES)}
    for key, limit in limits.items():
        value = run.setting(key, 0)
        if type(value) is not int or not 0 <= value <= limit:
            raise InputError(
                f"{paths[0]}: {key} is {value!r:.80}; must be an integer from 0 to {limit}"
            )
    _set_names(run, classes)
    return run


_COUNTS = ("MODEL.NUM_CLASSES", "EPICKITCHENS.NUM_NOUNS")


def _set_names(run: RunRecord, classes: str | None) -> None:
    """Set the class names of the run or, for actions, of its verb and noun records."""
    records = [*run.parts.values()] or [run]
    counts = []
    for record, key in zip(records, _COUNTS):
        used = [number for video in record.videos for number in _numbers(video)]
        used += [row.label for row in record.precisions]
        counts.append(max(max(used, default=-1) + 1, run.setting(key, 0)))
    keys = ("EPICKITCHENS.ANNOTATIONS_DIR", "DATA.PATH_TO_DATA_DIR")
    folder = next((str(run.setting(key)) for key in keys if run.setting(key)), "")
    if classes is None:
        names = _saved_names(run, sum(counts)) or _listed_names(folder, sum(counts))
    else:
        names = class_names(classes, sum(counts), folder)
    for record, count in zip(records, counts):
        record.names, names = names[:count], names[count:]


def _saved_names(run: RunRecord, count: int) -> list[str] | None:
    """The class names in the newest checkpoint of the run, or else in the tested checkpoint.

    None if neither has a list of `count` names.
    """
    for path in (*checkpoint.paths_in(run.folder)[-1:], run.checkpoint):
        names = checkpoint.peek_checkpoint(path).get("class_names")
        if type(names) is list and len(names) == count and {*map(type, names)} == {str}:
            return names
    return None


def _listed_names(folder: str, count: int) -> list[str]:
    """The class names in the folder of the lists; numbered names if these are missing or invalid.

    As in training and in `load`, invalid names are not fatal.
    """
    try:
        return class_names(None, count, folder)
    except DataError:
        return numbered(count)


def _numbers(video: TestedVideo) -> list[int]:
    """All class numbers in the label and the top 5 of a video."""
    labels = (video.label, *video.top5)
    return [n for label in labels for n in ((label,) if isinstance(label, int) else label)]


def _read(path: str) -> str:
    return Path(path).read_text("utf-8", "replace") if os.path.isfile(path) else ""


def json_object(text: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parse the text of the JSON file `path`; raise InputError if it is not a JSON object.

    An empty text gives {}.
    """
    try:
        content = parse_json(text or "{}")
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _add_results(run: RunRecord, text: str, path: str) -> None:
    results = json_object(text, path)
    try:
        run.checkpoint = str(results.get("checkpoint", ""))
        run.metrics = {key: float(results[key]) for key in TEST_METRICS if key in results}
        for entry in results["videos"]:
            run.videos.append(_tested_video(entry, entry["path"]))
            for part in {"verb", "noun"} & entry.keys():
                record = run.parts.get(part) or replace(run, videos=[], parts={})
                run.parts[part] = record
                record.videos.append(_tested_video(entry[part], entry["path"]))
        run.parts = {part: run.parts[part] for part in ("verb", "noun") if run.parts}
        if "map" in results:
            run.precisions = [
                ClassPrecision(int(label), float(row["ap"]), int(row["num_videos"]))
                for label, row in results["per_class"].items()
            ]
            if not all(0 <= row.label < MAX_CLASSES for row in run.precisions):
                raise ValueError("invalid entry in per_class")
        for entry in results["failed"]:
            run.failed.append(FailedVideo(str(entry["path"]), str(entry["reason"])))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = " ".join(repr(error).split())
        raise InputError(f"{path} does not contain test results: {reason:.300}") from None


def _tested_video(entry: dict[str, Any], path: Any) -> TestedVideo:
    def label(value: Any) -> Label:
        return tuple(map(int, value)) if isinstance(value, list) else int(value)

    top5, scores = [*map(label, entry["top5"])], [float(x) for x in entry["top5_scores"]]
    video = TestedVideo(str(path), label(entry["label"]), top5, scores)
    in_range = all(0 <= number < MAX_CLASSES for number in _numbers(video))
    if not in_range or not len(top5) == len(scores) > 0 or not np.isfinite(scores).all():
        raise ValueError(f"invalid entry for the video {path!s:.200}")
    return video


def read_stats(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Stats in a run's log; lines that are not valid JSON are skipped."""
    stats = []
    for line in _read(os.path.join(folder, LOG)).splitlines():
        # Skip indented lines: they continue a message, whose text may contain _JSON_MARK.
        text = "" if line[:1].isspace() else line.partition(_JSON_MARK)[2]
        with contextlib.suppress(ValueError):
            # Accept NaN and infinities: a logged loss may be NaN.
            content = parse_json(text, parse_constant=float)
            if isinstance(content, dict):
                stats.append(content)
    return stats


def _epochs(line: dict[str, Any]) -> float | None:
    """Completed epochs at a log line: 2.25 for {"epoch": "3/10", "iter": "16/64"}.

    None if the line has no valid epoch.
    """
    try:
        epoch = int(str(line["epoch"]).split("/")[0])
        if "iter" not in line:
            return float(epoch)
        step, steps = map(int, str(line["iter"]).split("/"))
        return epoch - 1 + step / steps
    except (KeyError, ValueError, ArithmeticError):
        return None
