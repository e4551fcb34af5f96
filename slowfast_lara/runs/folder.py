"""File names in a run's OUTPUT_DIR, and the record of a run read from these files."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.data.classes import class_names
from slowfast_lara.errors import InputError
from slowfast_lara.files import parse_json

# File names in OUTPUT_DIR; checkpoints are in checkpoints/ (see `checkpoint`). A training writes
# CONFIG and ENVIRONMENT; a test writes the same files with the prefix TEST_PREFIX.
LOG = "stdout.log"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
TEST_PREFIX = "test_"
TEST_RESULTS = "test_results.json"
# Limits the memory of the confusion matrix, [classes, classes].
MAX_CLASSES = 10_000

# PySlowFast's `log_json_stats` writes this before the JSON object.
_JSON_MARK = "json_stats: "


class TestedVideo(NamedTuple):
    """Label, top 5 classes and their scores of a tested video."""

    path: str
    label: int
    top5: list[int]
    scores: list[float]

    @property
    def correct(self) -> bool:
        return self.top5[0] == self.label


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

    def setting(self, key: str, default: Any = None) -> Any:
        """Value of a dotted config key; `default` if the key is missing."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def stats_of(self, kind: str) -> list[dict[str, Any]]:
        """Logged stats whose type or split is `kind`, e.g. "train_epoch"."""
        return [line for line in self.stats if kind in (line.get("_type"), line.get("split"))]

    def curve(self, kind: str, key: str) -> list[tuple[float, float]]:
        """(epochs, value) pairs of a key in the log; the value logged last for a step counts."""
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
            matrix[video.label, video.top5[0]] += 1
        return matrix


def read_run(folder: str, classes: str | None) -> RunRecord:
    """Read the record of a run; fields whose file is missing stay empty."""
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
    limits = {"MODEL.NUM_CLASSES": MAX_CLASSES, "TRAIN.BATCH_SIZE": 10**9, "NUM_SHARDS": 10**9}
    for key, limit in limits.items():
        value = run.setting(key, 0)
        if type(value) is not int or not 0 <= value <= limit:
            raise InputError(f"{paths[0]}: {key} is {value!r:.80}; must be from 0 to {limit}")
    used = max((max(video.label, *video.top5) + 1 for video in run.videos), default=0)
    count = max(used, run.setting("MODEL.NUM_CLASSES", 0))
    run.names = class_names(classes, count, str(run.setting("DATA.PATH_TO_DATA_DIR", "")))
    return run


def _read(path: str) -> str:
    return Path(path).read_text("utf-8", "replace") if os.path.isfile(path) else ""


def json_object(text: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parse the text of the JSON file `path`; raise InputError if it is not a JSON object."""
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
        for entry in results["videos"]:
            label, top5 = int(entry["label"]), [int(number) for number in entry["top5"]]
            scores = [float(score) for score in entry["top5_scores"]]
            in_range = all(0 <= number < MAX_CLASSES for number in (label, *top5))
            if not in_range or not len(top5) == len(scores) > 0 or not np.isfinite(scores).all():
                raise ValueError(f"invalid entry of {entry['path']!s:.200}")
            run.videos.append(TestedVideo(str(entry["path"]), label, top5, scores))
        for entry in results["failed"]:
            run.failed.append(FailedVideo(str(entry["path"]), str(entry["reason"])))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = " ".join(repr(error).split())
        raise InputError(f"{path} does not contain test results: {reason:.300}") from None


def read_stats(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Stats in a run's log; lines that are not valid JSON are skipped."""
    stats = []
    for line in _read(os.path.join(folder, LOG)).splitlines():
        # Skip indented lines: they continue a message, which may contain the mark.
        text = "" if line[:1].isspace() else line.partition(_JSON_MARK)[2]
        with contextlib.suppress(ValueError):
            content = parse_json(text, parse_constant=float)  # the loss may be NaN
            if isinstance(content, dict):
                stats.append(content)
    return stats


def _epochs(line: dict[str, Any]) -> float | None:
    """Completed epochs at a log line: 2.25 for {"epoch": "3/10", "iter": "16/64"}."""
    try:
        epoch = int(str(line["epoch"]).split("/")[0])
        if "iter" not in line:
            return float(epoch)
        step, steps = map(int, str(line["iter"]).split("/"))
        return epoch - 1 + step / steps
    except (KeyError, ValueError, ArithmeticError):
        return None
