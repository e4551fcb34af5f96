"""Drawing attention on the frames: a strip (PNG) and a video (MP4)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
from matplotlib import colormaps
from PIL import Image

from slowfast_lara.drawing import ACCENT, PAPER, VideoWriter, text_lines
from slowfast_lara.files import written_aside
from slowfast_lara.models.estimators import EXACT
from slowfast_lara.viewing.trajectories import Grid, Point

TILE = 168
GAP = 4
LABEL_WIDTH = 190
FONT = 13
# Slow enough to follow, and shown more than once.
VIDEO_FPS, VIDEO_ROUNDS = 4, 3


class Picture(NamedTuple):
    """What one attention makes of a point."""

    name: str
    weights: np.ndarray  # [F,P]
    path: np.ndarray  # [F,2], pixels of the view
    weight_error: float
    output_error: float

    def label(self) -> list[str]:
        if self.name == EXACT:
            return ["exact attention"]
        return [
            self.name,
            "mean squared error",
            f"of weights {self.weight_error:.1e}",
            f"of output {self.output_error:.1e}",
        ]


def write_strip(
    path: str, pixels: np.ndarray, pictures: Sequence[Picture], point: Point, grid: Grid
) -> None:
    """A row for each attention, a column for each frame of tokens."""
    most = _scale(pictures)
    # A token sees several frames of the video: their mean.
    means = pixels.reshape(grid.num_frames, grid.patch_frames, *pixels.shape[1:]).mean(1)
    heads = [text_lines([_frames(frame, grid)], TILE, FONT) for frame in range(grid.num_frames)]
    rows = [_beside([text_lines([""], LABEL_WIDTH, FONT), *heads])]
    for picture in pictures:
        tiles = [
            _tile(image.astype(np.uint8), frame, picture, point, grid, most)
            for frame, image in enumerate(means)
        ]
        rows.append(_beside([_label(picture.label(), LABEL_WIDTH, TILE), *tiles]))
    scale = _colour_scale(rows[0].shape[1] - LABEL_WIDTH - GAP, grid, most)
    meanings = ["box: the chosen patch", "line: where its attention", "goes, frame by frame"]
    rows.append(_beside([_label(meanings, LABEL_WIDTH, len(scale)), scale]))
    with written_aside(path) as aside:
        # 256 colours are a third of the bytes; this method keeps the rare ones too.
        image = Image.fromarray(_below(rows)).quantize(256, Image.Quantize.MAXCOVERAGE)
        image.save(aside, optimize=True)


def write_video(
    path: str, pixels: np.ndarray, pictures: Sequence[Picture], point: Point, grid: Grid
) -> None:
    """The attentions side by side, frame after frame."""
    most = _scale(pictures)
    columns = min(3, len(pictures))
    height = len(text_lines(max((picture.label() for picture in pictures), key=len), TILE, FONT))
    labels = [_label(picture.label(), TILE, height) for picture in pictures]
    scale = _colour_scale(columns * (TILE + GAP) - GAP, grid, most)
    with written_aside(path) as aside, contextlib.closing(VideoWriter(aside, VIDEO_FPS)) as video:
        for number in [*range(len(pixels))] * VIDEO_ROUNDS:
            frame = number // grid.patch_frames
            cells = [
                _below([label, _tile(pixels[number], frame, picture, point, grid, most)])
                for label, picture in zip(labels, pictures)
            ]
            cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
            rows = [_beside(cells[i : i + columns]) for i in range(0, len(cells), columns)]
            head = text_lines([f"frame {number}"], scale.shape[1], FONT)
            video.add(_below([head, *rows, scale]))


def _frames(frame: int, grid: Grid) -> str:
    """The frames of the clip that a frame of tokens covers."""
    first = frame * grid.patch_frames
    last = first + grid.patch_frames - 1
    return f"frame {first}" if first == last else f"frames {first} to {last}"


def _scale(pictures: Sequence[Picture]) -> float:
    """The weight of full colour: the largest of exact attention, which comes first."""
    return float(pictures[0].weights.max())


def _tile(
    image: np.ndarray, frame: int, picture: Picture, point: Point, grid: Grid, most: float
) -> np.ndarray:
    """A picture with the heat of a frame of tokens, the path so far, and the point."""
    image = cv2.resize(image, (TILE, TILE), interpolation=cv2.INTER_CUBIC)
    image = _warm(image, picture.weights[frame].reshape(grid.side, grid.side), most)
    scale = TILE / (grid.side * grid.patch)
    if point.frame // grid.patch_frames == frame:
        corner = np.array([point.x, point.y]) // grid.patch * grid.patch * scale
        opposite = corner + grid.patch * scale - 1
        cv2.rectangle(image, _pixel(corner), _pixel(opposite), (64, 220, 255), 2)
    path = [_pixel(centre * scale) for centre in picture.path[: frame + 1]]
    for start, end in zip(path, path[1:]):
        cv2.line(image, start, end, PAPER, 3, cv2.LINE_AA)
        cv2.line(image, start, end, ACCENT, 2, cv2.LINE_AA)
    cv2.circle(image, path[-1], 6, PAPER, -1, cv2.LINE_AA)
    cv2.circle(image, path[-1], 4, ACCENT, -1, cv2.LINE_AA)
    return image


def _warm(image: np.ndarray, weights: np.ndarray, most: float) -> np.ndarray:
    """A grey picture with colour where a token gets more than an equal share."""
    equal = 1 / weights.size
    heat = ((weights - equal) / max(most - equal, 1e-12)).clip(0, 1).astype(np.float32)
    return _coloured(image, cv2.resize(heat, image.shape[1::-1], interpolation=cv2.INTER_LINEAR))


def _coloured(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """A picture in grey, and in colour by its heat [H,W] from 0 to 1."""
    colour = 255 * colormaps["plasma"](0.3 + 0.7 * heat)[..., :3]
    grey = 0.7 * image.mean(axis=2, keepdims=True) + 40
    share = 0.75 * heat[..., None]
    return (grey * (1 - share) + colour * share).clip(0, 255).astype(np.uint8)


def _colour_scale(width: int, grid: Grid, most: float) -> np.ndarray:
    """What the colours mean, below a picture: RGB [H, width, 3]."""
    bar = _coloured(np.full((FONT, width, 3), 128), np.tile(np.linspace(0, 1, width), (FONT, 1)))
    equal = text_lines([f"equal, {1 / grid.side**2:.1%}"], width, FONT)
    largest = text_lines([f"most, {most:.1%}"], width, FONT, right=True)
    title = text_lines(["colour: a patch's share of", "the frame's attention"], width, FONT)
    return _below([title, bar, np.minimum(equal, largest)])


def _pixel(place: np.ndarray) -> tuple[int, int]:
    return int(round(place[0])), int(round(place[1]))


def _label(lines: Sequence[str], width: int, height: int) -> np.ndarray:
    text = text_lines(lines, width, FONT)
    return np.pad(text, ((0, max(height - len(text), 0)), (0, 0), (0, 0)), constant_values=255)


def _beside(tiles: Sequence[np.ndarray]) -> np.ndarray:
    gap = np.full((len(tiles[0]), GAP, 3), 255, np.uint8)
    return np.concatenate([part for tile in tiles for part in (tile, gap)][:-1], axis=1)


def _below(rows: Sequence[np.ndarray]) -> np.ndarray:
    gap = np.full((GAP, rows[0].shape[1], 3), 255, np.uint8)
    return np.concatenate([part for row in rows for part in (row, gap)][:-1])
