"""Charades: several classes per clip.

DATA.PATH_TO_DATA_DIR has train.csv and val.csv in one of two formats. Tests use test.csv if it
exists, otherwise val.csv.

- PySlowFast's frame lists, whose header starts with `original_vido_id`: one line per frame, with
  the classes of the frame as last column ("3,17", or "" for none). The frames are
  DATA.PATH_PREFIX/path.
- `path label` lists with several classes, such as `video.mp4 3,17`.

With frame lists, a training clip has the classes of all frames from its first to its last, as in
PySlowFast. In validation and tests, a video has the classes of all its frames.
"""

from __future__ import annotations

import os

import numpy as np

from slowfast_lara.data.frame_lists import has_header, read_frame_list
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.lists import find_prefix, parse_labels, read_path_labels
from slowfast_lara.data.sources import VideoPath
from slowfast_lara.data.string_array import StringArray
from slowfast_lara.labels import Label


class Charades(Kinetics):
    """Clips of NUM_FRAMES x SAMPLING_RATE frames, each with several classes."""

    frames_in_folders = True

    def read_lists(self) -> tuple[list[str], list[Label]]:
        data, num_classes = self.cfg.DATA, self.cfg.MODEL.NUM_CLASSES
        self._frames: StringArray | None = None
        list_file = self.list_or_val()
        if not has_header(list_file):
            separator, prefix = data.PATH_LABEL_SEPARATOR, data.PATH_PREFIX
            return read_path_labels(list_file, separator, num_classes, prefix, several=True)
        names, self._frames = read_frame_list(list_file, with_labels=True)
        first = [self._lines(index)[0][0] for index in range(len(names))]
        self._prefix = find_prefix(data.PATH_PREFIX, first[0], list_file)
        folders = [os.path.join(self._prefix, os.path.dirname(path)) for path in first]
        labels: list[Label] = [
            self._classes_of(index, slice(None), f"{list_file}, video {name}")
            for index, name in enumerate(names)
        ]
        return folders, labels

    def video_path(self, index: int) -> VideoPath:
        if self._frames is None:
            return super().video_path(index)
        return [os.path.join(self._prefix, path) for path, _ in self._lines(index)]

    def clip_label(self, index: int, draws: np.ndarray | None) -> Label:
        if self._frames is None or draws is None:
            return super().clip_label(index, draws)
        video_frames = len(self._lines(index))
        clip = self.clip_frames(self.cfg, draws, video_frames, self.cfg.DATA.TARGET_FPS)
        return self._classes_of(index, slice(clip[0], clip[-1] + 1), self.paths[index])

    def _lines(self, index: int) -> list[list[str]]:
        """[path, labels] of each frame of a video in a frame list."""
        assert self._frames is not None
        return [line.rsplit(" ", 1) for line in self._frames[index].split("\n")[:-1]]

    def _classes_of(self, index: int, frames: slice, where: str) -> tuple[int, ...]:
        """The classes of the given frames of a video; error messages start with `where`."""
        texts = {text.strip('"') for _, text in self._lines(index)[frames]}
        return parse_labels(",".join(texts - {""}), self.cfg.MODEL.NUM_CLASSES, where)
