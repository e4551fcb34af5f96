"""Something-Something-v2, in one of three layouts of DATA.PATH_TO_DATA_DIR.

- Only the official something-something-v2-{labels,train,validation}.json: the videos are
  DATA.PATH_PREFIX/ID.webm, or ID.mp4 after `data prepare`.
- These JSON files, and PySlowFast's train.csv and val.csv, whose header starts with
  `original_vido_id`: the videos are extracted frames. The column `path` of the lists is relative to
  DATA.PATH_PREFIX.
- `path label` lists as for Kinetics, without the JSON files. datasets/build_ssv2_lists.py writes
  such lists; they are needed if some videos are missing.
Tests use test.csv if it exists, otherwise the validation set: the official test set has no labels.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from fvcore.common.config import CfgNode

from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.frame_lists import has_header, read_frame_list
from slowfast_lara.data.lists import find_prefix, parse_label
from slowfast_lara.data.sampling import segment_indices, segment_view_indices
from slowfast_lara.data.text_files import load_json, open_text
from slowfast_lara.errors import DataError
from slowfast_lara.labels import Label

PREFIX = "something-something-v2-"


class Ssv2(VideoDataset):
    """Clips of one frame from each of NUM_FRAMES equal segments of the video."""

    # A mirrored video of "Pushing something from left to right" belongs to another class.
    may_flip = False
    frames_in_folders = True

    def read_lists(self) -> tuple[list[str], list[Label]]:
        folder = self.cfg.DATA.PATH_TO_DATA_DIR
        split = "train" if self.mode == "train" else "validation"
        list_file = self.list_or_val()
        has_list = os.path.exists(list_file)
        has_annotations = os.path.exists(os.path.join(folder, f"{PREFIX}labels.json"))
        if has_list and not has_annotations and not has_header(list_file):
            return self.read_path_list(list_file)
        label_of = read_annotations(folder, split, self.cfg.MODEL.NUM_CLASSES)
        if not has_list:
            tried = (f"{name}{suffix}" for name in label_of for suffix in (".webm", ".mp4"))
            prefix = find_prefix(self.cfg.DATA.PATH_PREFIX, tried, list_file)
            suffix = video_suffix(prefix, label_of)
            files = [os.path.join(prefix, f"{name}{suffix}") for name in label_of]
            return files, list(label_of.values())
        listed, frames, _ = read_frame_list(list_file)
        row_of = {name: row for row, name in enumerate(listed)}
        names = [name for name in label_of if name in row_of]
        if not names:
            raise DataError(f"{list_file}: none of its videos is in {PREFIX}{split}.json")
        folders = self.use_frames(frames, [row_of[name] for name in names], list_file)
        return folders, [label_of[name] for name in names]

    @classmethod
    def clip_frames(
        cls, cfg: CfgNode, draws: np.ndarray | None, video_frames: int, fps: float
    ) -> np.ndarray:
        return segment_indices(video_frames, cfg.DATA.NUM_FRAMES, 0.5 if draws is None else draws)

    @classmethod
    def view_frames(
        cls, cfg: CfgNode, view: int, num_views: int, video_frames: int, fps: float
    ) -> np.ndarray:
        return segment_view_indices(video_frames, cfg.DATA.NUM_FRAMES, view, num_views)

    @classmethod
    def window_frames(cls, cfg: CfgNode, available: int, length: int) -> np.ndarray:
        return segment_indices(available, cfg.DATA.NUM_FRAMES, 0.5)

    @classmethod
    def window_seconds(cls, cfg: CfgNode) -> float:
        return 4.0  # usual length of a video in this dataset, in seconds


def video_suffix(folder: str, names: Iterable[str]) -> str:
    """The suffix (.webm or .mp4) of the first existing video of the first 20; .webm if none."""
    for name in itertools.islice(names, 20):
        for suffix in (".webm", ".mp4"):
            if os.path.isfile(os.path.join(folder, f"{name}{suffix}")):
                return suffix
    return ".webm"


def read_annotations(folder: str, split: str, num_classes: int) -> dict[str, int]:
    """Read {video ID: label} of a split ("train" or "validation") from the official files."""
    labels_file = os.path.join(folder, f"{PREFIX}labels.json")
    class_of = _read_json(labels_file, dict, 'an object {"template": "class number"}')
    split_file = os.path.join(folder, f"{PREFIX}{split}.json")
    label_of: dict[str, int] = {}
    for number, entry in enumerate(_read_json(split_file, list, "a list of videos"), start=1):
        where = f"{split_file}, entry {number}"
        if not isinstance(entry, dict) or not {"id", "template"} <= entry.keys():
            raise DataError(
                f'{where}: expected an object with "id" and "template", got {entry!r:.80}'
            )
        template = str(entry["template"]).replace("[", "").replace("]", "")
        if template not in class_of:
            raise DataError(f"{where}: template {template!r:.80} is not in {labels_file}")
        where = f"{labels_file}, {template!r:.80}"
        label_of[str(entry["id"])] = parse_label(str(class_of[template]), num_classes, where)
    if not label_of:
        raise DataError(f"{split_file}: empty; expected a list of videos")
    return label_of


def _read_json(path: str, kind: type, expected: str) -> Any:
    with open_text(path) as file:
        content = load_json(file.read(), path)
    if not isinstance(content, kind):
        raise DataError(f"{path}, line 1: expected {expected}, got {type(content).__name__}")
    return content
