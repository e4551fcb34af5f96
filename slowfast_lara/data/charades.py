"""Charades: several classes per clip.

DATA.PATH_TO_DATA_DIR has train.csv and val.csv in one of two formats. Tests use test.csv if it
exists, otherwise val.csv.

- PySlowFast's frame lists, whose header starts with `original_vido_id`: one line per frame. The
  column `path` is the image, relative to DATA.PATH_PREFIX. The last column has the classes of the
  frame ("3,17", or "" for none).
- `path label` lists with several classes, such as `video.mp4 3,17`.

With frame lists, a training clip has the classes of all frames from its first to its last, as in
PySlowFast. In validation and tests, a video has the classes of all its frames.
"""

from __future__ import annotations

import numpy as np

from slowfast_lara.data.frame_lists import has_header, read_frame_list
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.lists import parse_labels
from slowfast_lara.labels import Label


class Charades(Kinetics):
    """Clips of NUM_FRAMES x SAMPLING_RATE; a label is a tuple of classes."""

    frames_in_folders = True

    def read_lists(self) -> tuple[list[str], list[Label]]:
        list_file = self.list_or_val()
        if not has_header(list_file):
            return self.read_path_list(list_file)
        names, frames, self._frame_labels = read_frame_list(list_file, with_labels=True)
        labels: list[Label] = [
            self._classes_of(label_lines.split("\n")[:-1], f"{list_file}, video {name}")
            for name, label_lines in zip(names, self._frame_labels)
        ]
        return self.use_frames(frames, list(range(len(names))), list_file), labels

    def clip_label(self, index: int, draws: np.ndarray | None) -> Label:
        if self._frames is None or draws is None:
            return super().clip_label(index, draws)
        labels = self._frame_labels[index].split("\n")[:-1]
        clip = self.clip_frames(self.cfg, draws, len(labels), self.cfg.DATA.TARGET_FPS)
        return self._classes_of(labels[clip[0] : clip[-1] + 1], self.paths[index])

    def _classes_of(self, labels: list[str], where: str) -> tuple[int, ...]:
        """All classes in the labels of some frames; error messages start with `where`."""
        texts = {text.strip('"') for text in labels}
        return parse_labels(",".join(texts - {""}), self.cfg.MODEL.NUM_CLASSES, where)
