"""Videos of real pixels under a moving camera.

A shape cut out of one real frame moves over another one, and a camera that pans, zooms
and shakes looks at both. The camera moves alike for all classes, so that it does not tell
the class, and at its full strength as far as an object does, so that the object's way across
the picture does not either: only how the object moves against the background does. What
rests, rests on the background. Whatever leaves the picture comes in on the other side, and
goes on there with the background that it is now over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np

from slowfast_lara.prepare.motions import (
    SHAPES,
    Path,
    fill,
    outline,
    places,
    scene_paths,
    scene_time,
)
from studies.textures import Textures

# At full strength: how far the camera pans while an object crosses the picture, in pictures;
# the logarithm of its zoom; its shaking from frame to frame, a standard deviation in pictures.
MAX_PAN, MAX_ZOOM, MAX_SHAKE = 0.6, 0.3, 0.01
# An object is the one of so many pieces whose colour is farthest from the background's.
PIECES = 6


class Camera(NamedTuple):
    """Where the camera looks in every frame, in units of the picture's size, and its zoom."""

    x: np.ndarray
    y: np.ndarray
    zoom: np.ndarray


def render_textured(
    rng: np.random.Generator,
    motion: Callable[..., list[Path]],
    frames: int,
    size: int,
    two_objects: bool,
    textures: Textures,
    strength: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Video [T, H, W, 3] and track [T, 2] of a random object that moves so.

    `strength`: how much the camera moves, from 0 to 1.
    """
    time = scene_time(frames)
    paths = scene_paths(rng, motion, time, two_objects)
    camera = move_camera(rng, time, strength)
    seen = [as_seen(path, camera) for path in paths]
    behind = int(rng.integers(len(textures)))
    video = _look(rng, textures[behind][rng.integers(len(textures[behind]))], camera, size)
    shapes = rng.permutation(SHAPES)
    for number in reversed(range(len(seen))):  # the mover is drawn over the other
        piece = _cut_piece(rng, textures, behind, video[0].mean(axis=(0, 1)))
        corners = outline(str(shapes[number]), rng)
        _lay_over(video, seen[number], corners, piece)
    return video, np.stack([seen[0].x, seen[0].y], axis=1) * size


def move_camera(rng: np.random.Generator, time: np.ndarray, strength: float) -> Camera:
    """It is where a still camera would be in the middle of its way; in long videos it turns."""
    way = strength * (0.5 - np.abs(1 - time % 2))  # from -0.5 to 0.5 and back
    angle, length = rng.uniform(0, 2 * math.pi), rng.uniform(0, MAX_PAN)
    shake = rng.normal(size=(2, len(time))).clip(-3, 3) * strength * rng.uniform(0, MAX_SHAKE)
    x = length * math.cos(angle) * way + shake[0]
    y = length * math.sin(angle) * way + shake[1]
    return Camera(x, y, np.exp(rng.uniform(-MAX_ZOOM, MAX_ZOOM) * way))


def as_seen(path: Path, camera: Camera) -> Path:
    """A path over the background, as a path across the picture."""
    growth = camera.zoom[1:] / camera.zoom[:-1]
    seen = []
    for place, look in ((path.x, camera.x), (path.y, camera.y)):
        now = 0.5 + (place[0] - look[0] - 0.5) * camera.zoom[0]
        way = [now % 1]
        for step, zoom, more in zip(np.diff(place - look), camera.zoom, growth):
            # By the zoom, all things move away from the middle of the picture.
            way.append((0.5 + (way[-1] + step * zoom - 0.5) * more) % 1)
        seen.append(np.array(way))
    return Path(seen[0], seen[1], path.radius * camera.zoom)


def _look(rng: np.random.Generator, frame: np.ndarray, camera: Camera, size: int) -> np.ndarray:
    """[T, size, size, 3]: what the camera sees of a frame, from a random place of it."""
    middle = []
    for ways, length in ((camera.x, frame.shape[1]), (camera.y, frame.shape[0])):
        reach = size * (0.5 / camera.zoom.min() + np.abs(ways).max()) + 1
        middle.append(rng.uniform(reach, length - reach))
    video = np.empty((len(camera.x), size, size, 3), np.uint8)
    for picture, x, y, zoom in zip(video, *camera):
        # From a pixel of the picture to its place in the frame.
        first = [
            centre + size * look - (size - 1) / 2 / zoom - 0.5
            for centre, look in zip(middle, (x, y))
        ]
        matrix = np.array([[1 / zoom, 0, first[0]], [0, 1 / zoom, first[1]]])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        cv2.warpAffine(frame, matrix, (size, size), dst=picture, flags=flags)
    return video


def _cut_piece(
    rng: np.random.Generator, textures: Textures, behind: int, color: np.ndarray
) -> np.ndarray:
    """A square of a frame, of another video than the background if there is one."""
    pieces = []
    for _ in range(PIECES):
        step = rng.integers(1, len(textures)) if len(textures) > 1 else 0
        frames = textures[(behind + step) % len(textures)]
        frame = frames[rng.integers(len(frames))]
        side = int(rng.uniform(0.15, 0.4) * min(frame.shape[:2]))
        top, left = (int(rng.integers(length - side)) for length in frame.shape[:2])
        pieces.append(frame[top : top + side, left : left + side])
    return max(pieces, key=lambda piece: np.abs(piece.mean(axis=(0, 1)) - color).sum())


def _lay_over(video: np.ndarray, path: Path, corners: np.ndarray, piece: np.ndarray) -> None:
    """Draw a shape with the pixels of the piece into every picture."""
    size = video.shape[1]
    side = max(round(2 * float(path.radius.max()) * size), 2)
    piece = cv2.resize(piece, (side, side), interpolation=cv2.INTER_AREA)
    for picture, x, y, radius in zip(video, *path):
        scale = 2 * radius * size / side
        for centre in places(x * size, y * size, radius * size + 1, size):
            first = centre - scale * (side - 1) / 2 - 0.5
            matrix = np.array([[scale, 0, first[0]], [0, scale, first[1]]])
            # Replicate: the shape's soft edge may reach beyond the piece.
            border = cv2.BORDER_REPLICATE
            layer = cv2.warpAffine(piece, matrix, (size, size), borderMode=border)
            mask = np.zeros((size, size, 1), np.uint8)
            fill(mask, corners * radius * size + centre, [255])
            share = mask.astype(np.float32) / 255
            picture[:] = (picture + (layer - picture.astype(np.float32)) * share).round()
