"""Textures: frames of real videos that provide the pixels of a textured set.

The frames are read once, scaled to the size that the set needs, and kept in memory. They come from
the first MAX_SECONDS of at most MAX_VIDEOS videos. There are at most MAX_FRAMES frames and
MAX_BYTES bytes, but at least one frame per video and split. If there are many videos, each video
belongs to one split; if there are few, the frames of each video are divided among the splits by
time. Splits share no frames, unless one of few videos has fewer frames than there are splits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from slowfast_lara.data.lists import videos_below
from slowfast_lara.data.regions import Region
from slowfast_lara.data.sources import read_frames
from slowfast_lara.errors import DecodeError, InputError, printable

# One array [n, H, W, 3] per video.
Textures = list[np.ndarray]

# Shorter side of a texture as a multiple of the video size: room for the camera to move.
ROOM = 3
# Maximum ratio of the longer to the shorter side of a texture; the longer side is cropped to it.
MAX_ASPECT = 2
MAX_VIDEOS, MAX_FRAMES, MAX_BYTES, MAX_SECONDS = 128, 512, 2**28, 60
# With at least this many videos, a split gets whole videos; with fewer, a part of every video.
SPLIT_BY_FILE = 20
# Start of the second and third split, as a fraction of the videos or frames.
SPLIT_STARTS = (0.7, 0.85)


def read_textures(folder: str, size: int, splits: Sequence[str]) -> dict[str, Textures]:
    """Read the textures of each split, for videos of size x size pixels."""
    if not os.path.isdir(folder):
        raise InputError(f"--textures {folder}: no such folder")
    paths = list(videos_below(folder))
    if not paths:
        raise InputError(f"--textures {folder}: contains no videos")
    paths = [paths[i] for i in np.unique(np.linspace(0, len(paths) - 1, MAX_VIDEOS).astype(int))]
    side = ROOM * size
    frames = min(MAX_FRAMES, MAX_BYTES // (3 * side * side * MAX_ASPECT)) // len(paths)
    videos, reasons = [], []
    for path in paths:
        try:
            videos.append(_read(path, frames, len(splits), size))
        except DecodeError as error:
            reasons.append(str(error))
    if not videos:
        raise InputError(
            f"--textures {folder}: no usable video among {len(paths)}; the first: {reasons[0]}"
        )
    if reasons:
        print(printable(f"skipping {len(reasons)} of {len(paths)} videos; the first: {reasons[0]}"))
    return _divide(videos, splits)


def _read(path: str, maximum: int, minimum: int, size: int) -> np.ndarray:
    """Read evenly spaced frames of a video; frames repeat if it has fewer than `minimum`."""

    def choose(number: int, fps: float) -> np.ndarray:
        number = max(int(min(number, MAX_SECONDS * fps)), 1)
        return np.linspace(0, number - 1, max(min(number, maximum), minimum)).round().astype(int)

    def crop(height: int, width: int) -> Region:
        if min(height, width) < size:
            raise DecodeError(f"{path}: {width}x{height} pixels; must be at least {size}x{size}")
        longest = MAX_ASPECT * min(height, width)
        rows, columns = min(height, longest), min(width, longest)
        scale = ROOM * size / min(rows, columns)
        out = (round(rows * scale), round(columns * scale))
        return Region((height - rows) // 2, (width - columns) // 2, rows, columns, *out)

    frames = read_frames(path, choose, crop, whole=False)
    return frames.pixels[frames.order]


def _divide(videos: Textures, splits: Sequence[str]) -> dict[str, Textures]:
    if len(videos) >= SPLIT_BY_FILE:
        return {split: videos[part] for split, part in zip(splits, _parts(len(videos)))}
    parts: dict[str, Textures] = {split: [] for split in splits}
    for frames in videos:
        for split, part in zip(splits, _parts(len(frames)), strict=True):
            parts[split].append(frames[part])
    return parts


def _parts(length: int) -> list[slice]:
    """Slices that divide a sequence of at least three items into three non-empty parts."""
    second = min(int(SPLIT_STARTS[0] * length), length - 2)
    third = max(int(SPLIT_STARTS[1] * length), second + 1)
    return [slice(0, second), slice(second, third), slice(third, length)]
