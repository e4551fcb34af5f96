"""Frame indices of clips and views.

Kinetics uses PySlowFast's rule: equally spaced frames of a clip. Something-Something uses one frame
from each of T equal segments of the whole video.
"""

from __future__ import annotations

import numpy as np
import torch


def clip_indices(
    video_frames: int, length: float, num_frames: int, view: float, num_views: int
) -> np.ndarray:
    """Frame indices of clip number `view` of `num_views` evenly spaced clips of `length` frames.

    If `num_views` is 1, a random `view` in [0, 1) gives a random clip. Indices are computed in
    float32, as in PySlowFast: in float64, some would be truncated to another frame.
    """
    start = max(video_frames - length, 0) * view / num_views
    indices = torch.linspace(start, start + length - 1, num_frames)
    return indices.clamp(0, video_frames - 1).long().numpy()


def segment_indices(video_frames: int, num_frames: int, offsets: float | np.ndarray) -> np.ndarray:
    """One frame index per equal segment; `offsets` in [0, 1) are the positions in the segments."""
    segments = np.arange(num_frames)
    indices = np.floor((segments + offsets) * video_frames / num_frames)
    return indices.astype(np.int64).clip(0, video_frames - 1)


def segment_view_indices(
    video_frames: int, num_frames: int, view: int, num_views: int
) -> np.ndarray:
    """Frame indices of view number `view` of `num_views`; views are evenly spaced in each segment.

    (PySlowFast uses the same frames for every view.) If a segment has fewer frames than there are
    views, some views use the same frame of the segment. Each segment then rounds at a different
    threshold, so that such views usually differ in another segment.
    """
    if video_frames >= num_frames * num_views or num_views == 1:
        return segment_indices(video_frames, num_frames, (view + 0.5) / num_views)
    segments = np.arange(num_frames)
    first = np.floor(segments * video_frames / num_frames)
    last = np.ceil((segments + 1) * video_frames / num_frames) - 1
    thresholds = (segments + 0.5) / num_frames
    indices = first + np.floor(view / (num_views - 1) * (last - first) + thresholds)
    return indices.astype(np.int64)
