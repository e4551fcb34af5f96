"""Frames of real videos, from which a synthetic set takes its pixels.

They are read once, scaled to what the set needs, and kept in memory: at most MAX_FRAMES
frames or MAX_BYTES bytes of at most MAX_VIDEOS videos, from the first LONGEST seconds of
each. The splits share no frame: of many videos each belongs to one split, and of few
each gives its first frames to the first split, later ones to the next, and so on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from slowfast_lara.data.lists import videos_below
from slowfast_lara.data.sources import read_frames
from slowfast_lara.data.video import Region
from slowfast_lara.errors import DecodeError, InputError, printable

# One array [n, H, W, 3] for each video.
Textures = list[np.ndarray]

# The shorter side of a frame in sizes of the set: the room in which a camera moves.
ROOM = 3
# The longer side of a frame, in shorter ones; what is beyond it is cut off.
MAX_ASPECT = 2
MAX_VIDEOS, MAX_FRAMES, MAX_BYTES, LONGEST = 128, 512, 2**28, 60
# From this many videos on, each belongs to one split.
SPLIT_BY_FILE = 20
# Where the second and the third split begin, in the order of the files or of the frames.
SHARES = (0.7, 0.85)


def read_textures(folder: str, size: int, splits: Sequence[str]) -> dict[str, Textures]:
    """For each split, the textures of videos of size x size pixels."""
    if not os.path.isdir(folder):
        raise InputError(f"--textures {folder}: no such folder")
    paths = list(videos_below(folder))
    if not paths:
        raise InputError(f"--textures {folder}: no videos in it")
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
        raise InputError(f"--textures {folder}: none of {len(paths)} videos serves: {reasons[0]}")
    if reasons:
        print(printable(f"{len(reasons)} of {len(paths)} videos not used: {reasons[0]}"))
    return _divide(videos, splits)


def _read(path: str, most: int, least: int, size: int) -> np.ndarray:
    """Frames of the video, evenly spaced; only one of fewer than `least` has some twice."""

    def choose(number: int, fps: float) -> np.ndarray:
        number = max(int(min(number, LONGEST * fps)), 1)
        return np.linspace(0, number - 1, max(min(number, most), least)).round().astype(int)

    def place(height: int, width: int) -> Region:
        if min(height, width) < size:
            raise DecodeError(
                f"{path}: {width}x{height} pixels; at least {size} each way are expected"
            )
        longest = MAX_ASPECT * min(height, width)
        rows, columns = min(height, longest), min(width, longest)
        scale = ROOM * size / min(rows, columns)
        out = (round(rows * scale), round(columns * scale))
        return Region((height - rows) // 2, (width - columns) // 2, rows, columns, *out)

    frames = read_frames(path, choose, place, whole=False)
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
    """Three parts of a sequence of three or more, none of them empty."""
    second = min(int(SHARES[0] * length), length - 2)
    third = max(int(SHARES[1] * length), second + 1)
    return [slice(0, second), slice(second, third), slice(third, length)]
