"""Which frames make a clip: arithmetic only.

PySlowFast's rule for Kinetics; for Something-Something, one frame of each of T
equal segments of the video.
"""

from __future__ import annotations

import numpy as np
import torch


def clip_length(num_frames: int, sampling_rate: int, fps: float, target_fps: float) -> float:
    """How many frames of the video a clip spans."""
    return num_frames * sampling_rate * fps / target_fps


def clip_indices(
    video_frames: int, length: float, num_frames: int, view: float, num_views: int
) -> np.ndarray:
    """The frames of clip `view` of `num_views` evenly spread ones.

    `view` may be a fraction: with num_views 1, a number drawn from [0, 1) gives
    a random clip. Computed in float32 by torch, as PySlowFast does: where an
    index is close to a whole number, the rounding decides.
    """
    start = max(video_frames - length, 0) * view / num_views
    indices = torch.linspace(start, start + length - 1, num_frames)
    return indices.clamp(0, video_frames - 1).long().numpy()


def segment_indices(video_frames: int, num_frames: int, offsets: float | np.ndarray) -> np.ndarray:
    """One frame of each of `num_frames` segments, `offsets` (in [0, 1)) into them."""
    segments = np.arange(num_frames)
    indices = np.floor((segments + offsets) * video_frames / num_frames)
    return indices.astype(np.int64).clip(0, video_frames - 1)


def segment_view_indices(
    video_frames: int, num_frames: int, view: int, num_views: int
) -> np.ndarray:
    """View `view` of `num_views`, shifted evenly within the segments.

    PySlowFast takes the same frames for every view. Where segments have fewer
    frames than there are views, shifts are less than a frame: each segment then
    rounds at a threshold of its own, so that the views still differ.
    """
    if video_frames >= num_frames * num_views or num_views == 1:
        return segment_indices(video_frames, num_frames, (view + 0.5) / num_views)
    segments = np.arange(num_frames)
    first = np.floor(segments * video_frames / num_frames)
    last = np.ceil((segments + 1) * video_frames / num_frames) - 1
    thresholds = (segments + 0.5) / num_frames
    indices = first + np.floor(view / (num_views - 1) * (last - first) + thresholds)
    return indices.astype(np.int64)
