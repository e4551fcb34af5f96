"""Synthetic sets with real pixels and a moving camera: `python -m studies.textured OUT ...`.

A shape cut out of a real frame moves over another real frame, and a camera pans, zooms and shakes.
The camera motion has the same distribution in all classes. At full strength, the camera is about as
fast as an object. Therefore only the object's motion relative to the background reveals the class;
neither the camera motion nor the object's path in the picture does. Objects at rest are fixed to
the background. An object that leaves the picture reappears at the opposite edge, and continues its
motion relative to the background at that edge.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import cv2
import numpy as np

from slowfast_lara.cli.data import add_set_arguments
from slowfast_lara.cli.parser import CommandParser
from slowfast_lara.errors import InputError, run_with_exit_code
from slowfast_lara.prepare.motions import (
    SHAPES,
    Motion,
    ObjectPath,
    fill,
    outline,
    scene_paths,
    scene_time,
    wrapped_centres,
)
from slowfast_lara.prepare.synthetic import SPLITS, Settings, make_set
from studies.textures import Textures, read_textures

# Limits of the camera motion at full strength. MAX_PAN: distance of the pan per unit of scene_time,
# in picture sizes. MAX_ZOOM: change of log(zoom) per unit of scene_time. MAX_SHAKE: standard
# deviation of the shake, in picture sizes.
MAX_PAN, MAX_ZOOM, MAX_SHAKE = 0.6, 0.3, 0.01
# Number of candidate patches per object; the patch with the colour most unlike the background is
# used.
PATCHES = 6


class Camera(NamedTuple):
    """Position of the camera, in picture sizes, and its zoom factor in every frame."""

    x: np.ndarray
    y: np.ndarray
    zoom: np.ndarray


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m studies.textured", description=__doc__)
    add_set_arguments(parser)
    parser.add_flag("--textures", "folder with real videos", metavar="FOLDER", required=True)
    strength = "strength of the camera motion; a lower strength makes the task easier"
    parser.add_flag("--camera", strength, type=float, default=1.0, metavar="0..1")
    args = parser.parse_args(argv)
    return run_with_exit_code(partial(_make_textured_set, args))


def _make_textured_set(args: argparse.Namespace) -> None:
    if not 0 <= args.camera <= 1:
        raise InputError(f"--camera is {args.camera}; must be 0 to 1")
    videos = {split: getattr(args, split) for split in SPLITS}
    settings = Settings(
        args.out, args.classes, videos, args.size, args.frames, args.seed, args.form
    )
    textures = read_textures(args.textures, args.size, SPLITS)
    renderers = {
        split: partial(render_textured, textures=textures[split], strength=args.camera)
        for split in SPLITS
    }
    make_set(settings, args.jobs, renderers)


def render_textured(
    rng: np.random.Generator,
    motion: Motion,
    frames: int,
    size: int,
    two_objects: bool,
    textures: Textures,
    strength: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Render a random object with this motion; `strength` (0 to 1) scales the camera motion.

    Returns the video [T, H, W, 3], and the object's centre in pixels [T, 2].
    """
    time = scene_time(frames)
    paths = scene_paths(rng, motion, time, two_objects)
    camera = move_camera(rng, time, strength)
    shown = [picture_path(path, camera) for path in paths]
    background = int(rng.integers(len(textures)))
    frame = textures[background][rng.integers(len(textures[background]))]
    video = _film(rng, frame, camera, size)
    shapes = rng.permutation(SHAPES)
    for number in reversed(range(len(shown))):  # the moving object is drawn last, on top
        patch = _cut_patch(rng, textures, background, video[0].mean(axis=(0, 1)))
        corners = outline(str(shapes[number]), rng)
        _overlay(video, shown[number], corners, patch)
    return video, np.stack([shown[0].x, shown[0].y], axis=1) * size


def move_camera(rng: np.random.Generator, time: np.ndarray, strength: float) -> Camera:
    """Sample a random camera motion; in long videos the camera pans back and forth."""
    progress = strength * (0.5 - np.abs(1 - time % 2))  # from -0.5 to 0.5 and back
    angle, length = rng.uniform(0, 2 * math.pi), rng.uniform(0, MAX_PAN)
    shake = rng.normal(size=(2, len(time))).clip(-3, 3) * strength * rng.uniform(0, MAX_SHAKE)
    x = length * math.cos(angle) * progress + shake[0]
    y = length * math.sin(angle) * progress + shake[1]
    return Camera(x, y, np.exp(rng.uniform(-MAX_ZOOM, MAX_ZOOM) * progress))


def picture_path(path: ObjectPath, camera: Camera) -> ObjectPath:
    """Convert an object's path from background to picture coordinates, wrapped at the edges."""
    growth = camera.zoom[1:] / camera.zoom[:-1]
    coordinates = []
    for position, offset in ((path.x, camera.x), (path.y, camera.y)):
        first = 0.5 + (position[0] - offset[0] - 0.5) * camera.zoom[0]
        shown = [first % 1]
        for step, zoom, more in zip(np.diff(position - offset), camera.zoom, growth):
            # Zooming in moves everything away from the centre of the picture.
            shown.append((0.5 + (shown[-1] + step * zoom - 0.5) * more) % 1)
        coordinates.append(np.array(shown))
    return ObjectPath(coordinates[0], coordinates[1], path.radius * camera.zoom)


def _film(rng: np.random.Generator, frame: np.ndarray, camera: Camera, size: int) -> np.ndarray:
    """Video [T, size, size, 3] of the camera's view of a frame, around a random position."""
    centre = []
    for offsets, length in ((camera.x, frame.shape[1]), (camera.y, frame.shape[0])):
        margin = size * (0.5 / camera.zoom.min() + np.abs(offsets).max()) + 1
        centre.append(rng.uniform(margin, length - margin))
    video = np.empty((len(camera.x), size, size, 3), np.uint8)
    for picture, x, y, zoom in zip(video, *camera):
        origin = [
            middle + size * offset - (size - 1) / 2 / zoom - 0.5
            for middle, offset in zip(centre, (x, y))
        ]
        # Maps a pixel of the picture to its position in the frame.
        matrix = np.array([[1 / zoom, 0, origin[0]], [0, 1 / zoom, origin[1]]])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        cv2.warpAffine(frame, matrix, (size, size), dst=picture, flags=flags)
    return video


def _cut_patch(
    rng: np.random.Generator, textures: Textures, background: int, color: np.ndarray
) -> np.ndarray:
    """Cut a square out of a random frame; avoids the background's video if there are others."""
    patches = []
    for _ in range(PATCHES):
        step = rng.integers(1, len(textures)) if len(textures) > 1 else 0
        frames = textures[(background + step) % len(textures)]
        frame = frames[rng.integers(len(frames))]
        side = int(rng.uniform(0.15, 0.4) * min(frame.shape[:2]))
        top, left = (int(rng.integers(length - side)) for length in frame.shape[:2])
        patches.append(frame[top : top + side, left : left + side])
    return max(patches, key=lambda patch: np.abs(patch.mean(axis=(0, 1)) - color).sum())


def _overlay(video: np.ndarray, path: ObjectPath, corners: np.ndarray, patch: np.ndarray) -> None:
    """Draw a shape with the pixels of the patch into every picture."""
    size = video.shape[1]
    side = max(round(2 * float(path.radius.max()) * size), 2)
    patch = cv2.resize(patch, (side, side), interpolation=cv2.INTER_AREA)
    for picture, x, y, radius in zip(video, *path):
        scale = 2 * radius * size / side
        for centre in wrapped_centres(x * size, y * size, radius * size + 1, size):
            origin = centre - scale * (side - 1) / 2 - 0.5
            matrix = np.array([[scale, 0, origin[0]], [0, scale, origin[1]]])
            # Replicate, because the shape's anti-aliased edge may extend beyond the patch.
            border = cv2.BORDER_REPLICATE
            layer = cv2.warpAffine(patch, matrix, (size, size), borderMode=border)
            mask = np.zeros((size, size, 1), np.uint8)
            fill(mask, corners * radius * size + centre, [255])
            share = mask.astype(np.float32) / 255
            picture[:] = (picture + (layer - picture.astype(np.float32)) * share).round()


if __name__ == "__main__":
    sys.exit(main())
