"""Motion classes and object shapes of synthetic datasets."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np

SHAPES = ("disc", "square", "triangle", "star", "cross")


class ObjectPath(NamedTuple):
    """Centre and radius of an object in every frame, as fractions of the frame's size."""

    x: np.ndarray
    y: np.ndarray
    radius: np.ndarray


def drift(rng: np.random.Generator, time: np.ndarray, dx: int, dy: int) -> list[ObjectPath]:
    distance = rng.uniform(0.5, 1.0) * time
    x, y = rng.uniform(size=2)
    return [ObjectPath(x + dx * distance, y + dy * distance, constant_radius(rng, time))]


def orbit(rng: np.random.Generator, time: np.ndarray, sense: int) -> list[ObjectPath]:
    angle = rng.uniform(0, 2 * math.pi) + sense * rng.uniform(0.7, 1.1) * 2 * math.pi * time
    distance = rng.uniform(0.2, 0.3)
    x, y = rng.uniform(0.35, 0.65, size=2)
    xs, ys = x + distance * np.cos(angle), y + distance * np.sin(angle)
    return [ObjectPath(xs, ys, constant_radius(rng, time))]


def zoom(rng: np.random.Generator, time: np.ndarray, sense: int) -> list[ObjectPath]:
    """Grow (`sense` 1) or shrink (-1) an object; restart when it reaches the final size."""
    smallest, largest = 0.08, 0.32
    progress = (rng.uniform() + sense * rng.uniform(0.5, 0.8) * time) % 1
    x, y = rng.uniform(0.25, 0.75, size=2)
    radius = smallest * (largest / smallest) ** progress
    return [ObjectPath(np.full_like(time, x), np.full_like(time, y), radius)]


def meet(rng: np.random.Generator, time: np.ndarray, bounce: bool) -> list[ObjectPath]:
    """Move two objects towards each other; then they pass each other, or bounce back."""
    since_meeting = (time - time[-1] * rng.uniform(0.45, 0.55)) / max(time[-1], 1e-9)
    distance = rng.uniform(0.6, 0.9) * (np.abs(since_meeting) if bounce else since_meeting)
    angle, offset = rng.uniform(0, 2 * math.pi), rng.uniform(-0.05, 0.05)
    x, y = rng.uniform(0.4, 0.6, size=2)
    cos, sin = math.cos(angle), math.sin(angle)
    return [
        ObjectPath(
            x + side * (distance * cos - offset * sin),
            y + side * (distance * sin + offset * cos),
            constant_radius(rng, time),
        )
        for side in (1, -1)
    ]


def swing(rng: np.random.Generator, time: np.ndarray, dx: int, dy: int) -> list[ObjectPath]:
    phase = rng.uniform(0, 2 * math.pi) + rng.uniform(1.4, 2.0) * 2 * math.pi * time
    distance = rng.uniform(0.14, 0.22) * np.sin(phase)
    x, y = rng.uniform(size=2)
    return [ObjectPath(x + dx * distance, y + dy * distance, constant_radius(rng, time))]


def constant_radius(rng: np.random.Generator, time: np.ndarray) -> np.ndarray:
    return np.full_like(time, rng.uniform(0.11, 0.17))


# (generator, times [T]) -> random paths of one or two objects.
Motion = Callable[[np.random.Generator, np.ndarray], list[ObjectPath]]
CLASSES: dict[str, Motion] = {
    "drifting left": functools.partial(drift, dx=-1, dy=0),
    "drifting right": functools.partial(drift, dx=1, dy=0),
    "drifting up": functools.partial(drift, dx=0, dy=-1),
    "drifting down": functools.partial(drift, dx=0, dy=1),
    "circling clockwise": functools.partial(orbit, sense=1),
    "circling counter-clockwise": functools.partial(orbit, sense=-1),
    "approaching": functools.partial(zoom, sense=1),
    "receding": functools.partial(zoom, sense=-1),
    "passing another": functools.partial(meet, bounce=False),
    "bouncing back from another": functools.partial(meet, bounce=True),
    "swinging sideways": functools.partial(swing, dx=1, dy=0),
    "swinging up and down": functools.partial(swing, dx=0, dy=1),
}
# With this many classes or more, every video has two objects, and the second may be at rest:
# some classes need two objects, and the number of objects must not reveal the class.
TWO_OBJECTS = 9


def scene_time(frames: int) -> np.ndarray:
    """Times [T] of the frames; an object crosses the frame in about one unit of time.

    One unit is the whole video, but at least 16 and at most 64 frames. Motion is slower in long
    videos, so that it is visible in sparsely sampled clips.
    """
    return np.arange(frames) / min(max(frames, 16), 64)


def scene_paths(
    rng: np.random.Generator, motion: Motion, time: np.ndarray, two_objects: bool
) -> list[ObjectPath]:
    """Paths of all objects. `two_objects` adds one at rest if the motion has a single object."""
    paths = motion(rng, time)
    if two_objects and len(paths) == 1:
        x, y = rng.uniform(size=2)
        paths.append(
            ObjectPath(np.full_like(time, x), np.full_like(time, y), constant_radius(rng, time))
        )
    return paths


def outline(shape: str, rng: np.random.Generator) -> np.ndarray:
    """Corners [n, 2] of a shape of radius 1, randomly rotated."""
    corners = {"disc": 32, "square": 4, "triangle": 3, "star": 10, "cross": 12}[shape]
    angles = np.arange(corners) * 2 * math.pi / corners
    radii = np.ones(corners)
    if shape == "star":
        radii[1::2] = 0.45
    if shape == "cross":
        arm = math.atan2(0.35, 1)
        angles = np.concatenate(
            [[turn - arm, turn + arm, turn + math.pi / 4] for turn in np.arange(4) * math.pi / 2]
        )
        radii[2::3] = 0.35 * math.sqrt(2)
    angles = angles + rng.uniform(0, 2 * math.pi)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * radii[:, None]


def wrapped_centres(x: float, y: float, radius: float, size: int) -> list[np.ndarray]:
    """Where to draw an object: at (x, y), and shifted by `size` if the object crosses an edge."""
    xs, ys = (
        [centre + shift for shift in (-size, 0, size) if -radius < centre + shift < size + radius]
        for centre in (x, y)
    )
    return [np.array([one_x, one_y]) for one_x in xs for one_y in ys]


def fill(frame: np.ndarray, corners: np.ndarray, color: list[int]) -> None:
    """Fill a polygon; our pixel centres are at half-integers, OpenCV's are at integers."""
    points = ((corners - 0.5) * 16).round().astype(np.int32)
    cv2.fillPoly(frame, [points], color, lineType=cv2.LINE_AA, shift=4)
