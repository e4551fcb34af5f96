"""EPIC-KITCHENS-100: each action has a verb and a noun, and is a range of extracted frames.

The annotations are the official CSV files, EPIC_100_train.csv and EPIC_100_validation.csv, in
EPICKITCHENS.ANNOTATIONS_DIR. The frames are
EPICKITCHENS.VISUAL_DATA_DIR/P01/rgb_frames/P01_101/frame_0000000001.jpg and so on. Motionformer's
configs name pickles of the same annotations. Pickles are never read: unpickling can run any code.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator

from fvcore.common.config import CfgNode

from slowfast_lara.data.frame_range import FrameRange
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.lists import parse_label
from slowfast_lara.data.sources import VideoPath
from slowfast_lara.data.text_files import open_text
from slowfast_lara.errors import DataError
from slowfast_lara.labels import Label, label_kind

SOURCE = "https://github.com/epic-kitchens/epic-kitchens-100-annotations"


class Epickitchens(Kinetics):
    """Clips of NUM_FRAMES x SAMPLING_RATE from actions; a label is a (verb, noun) pair."""

    frames_in_folders = True
    prefix_key = "EPICKITCHENS.VISUAL_DATA_DIR"

    def read_lists(self) -> tuple[list[str], list[Label]]:
        frames = self.cfg.EPICKITCHENS.VISUAL_DATA_DIR or self.cfg.DATA.PATH_TO_DATA_DIR
        verbs, nouns = label_kind(self.cfg).parts.values()
        paths: list[str] = []
        labels: list[Label] = []
        for path in annotation_files(self.cfg, self.mode):
            for where, row in _read_rows(path):
                paths.append(str(_frames_of(row, frames, where)))
                verb, noun = (_field(row, f"{part}_class", where) for part in ("verb", "noun"))
                noun_label = parse_label(noun, nouns, where, "EPICKITCHENS.NUM_NOUNS")
                labels.append((parse_label(verb, verbs, where), noun_label))
        if not paths:
            raise DataError(f"{path}: no actions; expected a header and one line per action")
        return paths, labels

    def video_path(self, index: int) -> VideoPath:
        return FrameRange.parse(self.paths[index]) or self.paths[index]


def annotation_files(cfg: CfgNode, mode: str) -> list[str]:
    """Paths of the CSV files of a mode; NAME.pkl in the config is replaced by NAME.csv."""
    node = cfg.EPICKITCHENS
    names = [{"train": node.TRAIN_LIST, "val": node.VAL_LIST, "test": node.TEST_LIST}[mode]]
    if mode == "train" and node.TRAIN_PLUS_VAL:
        names.append(node.VAL_LIST)
    return [
        os.path.join(annotations_folder(cfg), re.sub(r"\.(pkl|pickle)$", ".csv", name))
        for name in names
    ]


def annotations_folder(cfg: CfgNode) -> str:
    return cfg.EPICKITCHENS.ANNOTATIONS_DIR or cfg.DATA.PATH_TO_DATA_DIR


def _read_rows(path: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (location, {column: field}) for each line; the location is for errors."""
    if not os.path.exists(path):
        raise DataError(f"no annotations {path}: copy the CSV file (not the .pkl) from {SOURCE}")
    with open_text(path, newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                yield f"{path}, line {reader.line_num}", row
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num + 1}: {error}") from None


def _field(row: dict[str, str], column: str, where: str) -> str:
    value = row.get(column)
    if not value:
        raise DataError(f"{where}: no {column}; expected the columns of EPIC_100_train.csv")
    return value


def _frames_of(row: dict[str, str], folder: str, where: str) -> FrameRange:
    """The frames of an action: the files numbered `start_frame` + 1 to `stop_frame`."""
    video = _field(row, "video_id", where)
    participant = row.get("participant_id") or video.partition("_")[0]
    frames = FrameRange(os.path.join(folder, participant, "rgb_frames", video), 1, 1)
    start, stop = (_frame_number(row, side, frames.fps, where) for side in ("start", "stop"))
    if not 0 <= start < stop < 10**10:
        raise DataError(f"{where}: frames {start} to {stop}; must be 0 <= start < stop < 10^10")
    return FrameRange(frames.folder, start + 1, stop)


def _frame_number(row: dict[str, str], side: str, fps: int | None, where: str) -> int:
    """The number in column SIDE_frame or, if that is empty, SIDE_timestamp times the frame rate."""
    text = row.get(f"{side}_frame")
    try:
        if text:
            return int(text)
        hours, minutes, seconds = _field(row, f"{side}_timestamp", where).split(":")
        return round((3600 * int(hours) + 60 * int(minutes) + float(seconds)) * (fps or 60))
    except (ValueError, OverflowError):
        time = row.get(f"{side}_timestamp")
        raise DataError(
            f"{where}: {side}_frame is {text!r:.40} and {side}_timestamp {time!r:.40}; expected an "
            "integer, or hours:minutes:seconds"
        ) from None
