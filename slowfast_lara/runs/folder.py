"""The files of a run in its folder, and the run as they tell it."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.data.classes import class_names
from slowfast_lara.errors import InputError
from slowfast_lara.files import parse_json

# OUTPUT_DIR holds these besides checkpoints/ (see `checkpoint`). Config and environment are
# those of the training; those of a test have names of their own.
LOG = "stdout.log"
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
OF_TEST = "test_"
TEST_RESULTS = "test_results.json"
# The table of which class is taken for which has the square of this.
MOST_CLASSES = 10_000
# Whole numbers that the report reckons with.
_SIZES = ("TRAIN.BATCH_SIZE", "NUM_SHARDS")

# PySlowFast's `log_json_stats` writes it before a line of numbers.
_MARK = "json_stats: "


class Video(NamedTuple):
    """A tested video: its true class, and the likeliest ones with their scores."""

    path: str
    label: int
    top5: list[int]
    scores: list[float]

    @property
    def correct(self) -> bool:
        return self.top5[0] == self.label


class Failed(NamedTuple):
    path: str
    reason: str


@dataclass
class Run:
    folder: str
    stats: list[dict[str, Any]]
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]
    names: list[str]
    videos: list[Video] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    checkpoint: str = ""

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the config by its dotted name."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.stats if kind in (line.get("_type"), line.get("split"))]

    def curve(self, kind: str, key: str) -> list[tuple[float, float]]:
        """(epochs, value) of the log's lines of a kind; of two at one place, the later one."""
        points = {}
        for line in self.of_type(kind):
            place, value = _epochs(line), line.get(key)
            if place is not None and isinstance(value, (int, float)) and math.isfinite(value):
                points[place] = float(value)
        return sorted(points.items())

    def confusion(self) -> np.ndarray:
        """Videos by true class and first guess, [classes, classes]."""
        matrix = np.zeros((len(self.names), len(self.names)), int)
        for video in self.videos:
            matrix[video.label, video.top5[0]] += 1
        return matrix


def read_run(folder: str, classes: str | None) -> Run:
    """Everything a run has left; what is missing stays empty."""
    if not os.path.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    # Where nothing was trained, the records of the test tell what was run.
    trained = os.path.isfile(os.path.join(folder, CONFIG))
    names = {CONFIG: CONFIG, ENVIRONMENT: ENVIRONMENT, TEST_RESULTS: TEST_RESULTS}
    if not trained:
        names.update({name: OF_TEST + name for name in (CONFIG, ENVIRONMENT)})
    paths = {name: os.path.join(folder, file) for name, file in names.items()}
    config_text, environment, results = map(_read, paths.values())
    stats = read_stats(folder)
    if not (stats or results):
        raise InputError(f"{folder}: no run here; {LOG} or {TEST_RESULTS} is expected")
    config = parse_yaml(config_text, paths[CONFIG])
    surroundings = json_object(environment, paths[ENVIRONMENT])
    run = Run(folder, stats, config_text, config, surroundings, [])
    if results:
        _add_results(run, results, paths[TEST_RESULTS])
    used = max((max(video.label, *video.top5) for video in run.videos), default=-1) + 1
    for key, most in (("MODEL.NUM_CLASSES", MOST_CLASSES), *((key, 10**9) for key in _SIZES)):
        value = run.setting(key, 0)
        if type(value) is not int or not 0 <= value <= most:
            raise InputError(f"{paths[CONFIG]}: {key} is {value!r:.80}; 0 to {most} are expected")
    count = max(used, run.setting("MODEL.NUM_CLASSES", 0))
    run.names = class_names(classes, count, str(run.setting("DATA.PATH_TO_DATA_DIR", "")))
    return run


def _read(path: str | os.PathLike[str]) -> str:
    if not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def json_object(text: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the text of a file says; an InputError with its path if that is no JSON object."""
    try:
        content = parse_json(text or "{}")
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a JSON object is expected")
    return content


def _add_results(run: Run, text: str, path: str) -> None:
    results = json_object(text, path)
    try:
        run.checkpoint = str(results.get("checkpoint", ""))
        for entry in results["videos"]:
            top5 = [int(label) for label in entry["top5"]]
            scores = [float(score) for score in entry["top5_scores"]]
            label = int(entry["label"])
            known = all(0 <= number < MOST_CLASSES for number in (label, *top5))
            scored = len(top5) == len(scores) > 0 and all(map(math.isfinite, scores))
            if not known or not scored:
                raise ValueError(f"the entry of {entry['path']!s:.200}")
            run.videos.append(Video(str(entry["path"]), label, top5, scores))
        run.failed = [
            Failed(str(entry["path"]), str(entry["reason"])) for entry in results["failed"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        reason = " ".join(repr(error).split())
        raise InputError(f"{path}: not the results of a test: {reason:.300}") from None


def read_stats(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The numbers in a run's log, line by line; a line that was cut off is passed over."""
    stats = []
    for line in _read(os.path.join(folder, LOG)).splitlines():
        if line[:1].isspace():  # a further line of a record, which may hold anything
            continue
        _, found, text = line.partition(_MARK)
        with contextlib.suppress(ValueError):
            # An epoch whose loss is not a number has its place in the log.
            content = parse_json(text, parse_constant=float) if found else None
            if isinstance(content, dict):
                stats.append(content)
    return stats


def _epochs(line: dict[str, Any]) -> float | None:
    """Epochs done at a line: "epoch": "3/10", "iter": "16/64" is 2.25."""
    try:
        epoch = int(str(line["epoch"]).split("/")[0])
        if "iter" not in line:
            return float(epoch)
        done, total = map(int, str(line["iter"]).split("/"))
        return epoch - 1 + done / total
    except (KeyError, ValueError, ArithmeticError):
        return None
