"""Kinetics, and any dataset with `path label` lists (with DATA.MULTI_LABEL, `path 3,17`)."""

from __future__ import annotations

import os

import numpy as np
from fvcore.common.config import CfgNode

from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.sampling import clip_indices
from slowfast_lara.labels import Label


class Kinetics(VideoDataset):
    """Clips of NUM_FRAMES x SAMPLING_RATE from DATA.PATH_TO_DATA_DIR/{train,val,test}.csv."""

    def read_lists(self) -> tuple[list[str], list[Label]]:
        return self.read_path_list(os.path.join(self.cfg.DATA.PATH_TO_DATA_DIR, f"{self.mode}.csv"))

    @classmethod
    def clip_frames(
        cls, cfg: CfgNode, draws: np.ndarray | None, video_frames: int, fps: float
    ) -> np.ndarray:
        start = 0.5 if draws is None else draws[0]
        length = _clip_length(cfg, fps)
        return clip_indices(video_frames, length, cfg.DATA.NUM_FRAMES, start, 1)

    @classmethod
    def view_frames(
        cls, cfg: CfgNode, view: int, num_views: int, video_frames: int, fps: float
    ) -> np.ndarray:
        length = _clip_length(cfg, fps)
        return clip_indices(video_frames, length, cfg.DATA.NUM_FRAMES, view, num_views)

    @classmethod
    def window_frames(cls, cfg: CfgNode, available: int, length: int) -> np.ndarray:
        return clip_indices(available, length, cfg.DATA.NUM_FRAMES, 0, 1)

    @classmethod
    def window_seconds(cls, cfg: CfgNode) -> float:
        return _clip_length(cfg, fps=1)


def _clip_length(cfg: CfgNode, fps: float) -> float:
    """Number of video frames that a clip spans, at the frame rate of the video."""
    return cfg.DATA.NUM_FRAMES * cfg.DATA.SAMPLING_RATE * fps / cfg.DATA.TARGET_FPS
