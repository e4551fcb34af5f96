"""Frame indices of clips and views.

PySlowFast's rule for Kinetics; for Something-Something, one frame from each of T equal segments of
the video.
"""

from __future__ import annotations

import numpy as np
import torch


def clip_indices(
    video_frames: int, length: float, num_frames: int, view: float, num_views: int
) -> np.ndarray:
    """Frames of clip `view` of `num_views` evenly spaced clips that each span `length` frames.

    With num_views 1, a fraction `view` drawn from [0, 1) gives a random clip. Torch computes in
    float32, as in PySlowFast: indices close to a whole number depend on the rounding.
    """
    start = max(video_frames - length, 0) * view / num_views
    indices = torch.linspace(start, start + length - 1, num_frames)
    return indices.clamp(0, video_frames - 1).long().numpy()


def segment_indices(video_frames: int, num_frames: int, offsets: float | np.ndarray) -> np.ndarray:
    """One frame from each of `num_frames` segments, at `offsets` in [0, 1) within them."""
    segments = np.arange(num_frames)
    indices = np.floor((segments + offsets) * video_frames / num_frames)
    return indices.astype(np.int64).clip(0, video_frames - 1)


def segment_view_indices(
    video_frames: int, num_frames: int, view: int, num_views: int
) -> np.ndarray:
    """Frames of view `view` of `num_views`, shifted evenly within the segments.

    (PySlowFast uses the same frames for every view.) If segments have fewer frames than there are
    views, shifts are below one frame: each segment rounds at its own threshold, so that the views
    still differ.
    """
    if video_frames >= num_frames * num_views or num_views == 1:
        return segment_indices(video_frames, num_frames, (view + 0.5) / num_views)
    segments = np.arange(num_frames)
    first = np.floor(segments * video_frames / num_frames)
    last = np.ceil((segments + 1) * video_frames / num_frames) - 1
    thresholds = (segments + 0.5) / num_frames
    indices = first + np.floor(view / (num_views - 1) * (last - first) + thresholds)
    return indices.astype(np.int64)
