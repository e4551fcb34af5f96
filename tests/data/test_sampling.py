from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from slowfast.datasets.decoder import get_start_end_idx, temporal_sampling

from slowfast_lara.data.sampling import clip_indices, segment_indices, segment_view_indices


@pytest.mark.parametrize("num_frames, rate", [(16, 4), (32, 3), (16, 8), (8, 8)])
def test_clips_are_those_of_pyslowfast(num_frames, rate):
    rng = np.random.default_rng(0)
    for _ in range(200):
        frames, fps = int(rng.integers(1, 400)), rng.choice([12, 23.976, 25, 29.97, 30, 60])
        views = int(rng.integers(1, 12))
        view = int(rng.integers(views))
        length = num_frames * rate * fps / 30
        start, end = get_start_end_idx(frames, length, view, views)
        expected = temporal_sampling(torch.arange(frames), start, end, num_frames)
        indices = clip_indices(frames, length, num_frames, view, views)
        assert indices.tolist() == expected.tolist()


def test_short_videos_repeat_their_last_frame():
    assert clip_indices(3, 64, 4, 0, 1).tolist() == [0, 2, 2, 2]
    assert clip_indices(1, 64, 4, 0.7, 1).tolist() == [0, 0, 0, 0]


def test_random_clips_reach_both_ends():
    starts = [clip_indices(100, 64, 16, u, 1) for u in (0.0, 0.999999)]
    assert starts[0][0] == 0 and starts[1][-1] >= 98


@pytest.mark.parametrize("frames", [1, 5, 8, 9, 17, 45, 80, 333])
def test_segments(frames):
    bounds = np.arange(9) * frames / 8
    centre = segment_indices(frames, 8, 0.5)
    assert centre.tolist() == [int((low + high) / 2) for low, high in zip(bounds, bounds[1:])]
    for draw in np.random.default_rng(0).random((100, 8)):
        indices = segment_indices(frames, 8, draw)
        assert (indices >= np.floor(bounds[:-1])).all()
        assert (indices < np.ceil(bounds[1:])).all() and (indices < frames).all()


@pytest.mark.parametrize("num_frames", [8, 16, 32])
@pytest.mark.parametrize("segment", [2, 2.13, 2.5, 3, 4, 5.7, 9.9, 10, 20])
def test_ten_segment_views_differ(segment, num_frames):
    frames = math.ceil(segment * num_frames)
    views = [segment_view_indices(frames, num_frames, view, 10) for view in range(10)]
    # 8 segments of 2 frames have only 9 different views in order.
    possible = min(10, 1 + num_frames * (math.ceil(segment) - 1))
    assert len({tuple(view) for view in views}) == possible
    bounds = np.arange(num_frames + 1) * frames / num_frames
    for view in views:
        assert (view >= np.floor(bounds[:-1])).all() and (view < np.ceil(bounds[1:])).all()
    # Shifted in order and evenly, within a frame of the exact position.
    assert (np.diff(views, axis=0) >= 0).all()
    exact = bounds[:-1] + (np.arange(10)[:, None] + 0.5) / 10 * frames / num_frames
    assert np.abs(np.array(views) + 0.5 - exact).max() <= 1.5


def test_segment_views_of_long_segments_are_evenly_shifted():
    views = [segment_view_indices(80, 8, view, 10) for view in range(10)]
    assert np.array_equal(views, np.arange(10)[:, None] + np.arange(0, 80, 10))


def test_one_segment_view_is_the_centre():
    assert segment_view_indices(45, 16, 0, 1).tolist() == segment_indices(45, 16, 0.5).tolist()
