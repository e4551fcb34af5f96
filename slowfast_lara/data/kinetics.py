"""Kinetics, and any set with `path label` lists."""

from __future__ import annotations

import os

import numpy as np
from slowfast.datasets.build import DATASET_REGISTRY

from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.lists import read_path_labels
from slowfast_lara.data.sampling import clip_indices, clip_length

# PySlowFast registers its own under the same name; fvcore has no public way to
# replace an entry.
DATASET_REGISTRY._obj_map.pop("Kinetics", None)


@DATASET_REGISTRY.register()
class Kinetics(VideoDataset):
    """Clips of NUM_FRAMES x SAMPLING_RATE from DATA.PATH_TO_DATA_DIR/{train,val,test}.csv."""

    def _read_lists(self) -> tuple[list[str], list[int]]:
        data = self.cfg.DATA
        list_file = os.path.join(data.PATH_TO_DATA_DIR, f"{self.mode}.csv")
        return read_path_labels(
            list_file, data.PATH_LABEL_SEPARATOR, self.cfg.MODEL.NUM_CLASSES, data.PATH_PREFIX
        )

    def _choose(self, draws: np.ndarray | None, video_frames: int, fps: float) -> np.ndarray:
        data = self.cfg.DATA
        length = clip_length(data.NUM_FRAMES, data.SAMPLING_RATE, fps, data.TARGET_FPS)
        start = 0.5 if draws is None else draws[0]
        return clip_indices(video_frames, length, data.NUM_FRAMES, start, 1)
