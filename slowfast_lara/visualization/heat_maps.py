"""Drawing attention on the frames: a strip (PNG) and a video (MP4)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
from matplotlib import colormaps
from PIL import Image

from slowfast_lara.drawing import ACCENT, PAPER, VideoWriter, text_lines
from slowfast_lara.files import atomic_write
from slowfast_lara.models.attention_config import EXACT
from slowfast_lara.visualization.trajectories import Grid, Point

TILE = 168
GAP = 4
LABEL_WIDTH = 190
FONT = 13
# Slow enough to follow, and shown more than once.
VIDEO_FPS, VIDEO_ROUNDS = 4, 3


class Picture(NamedTuple):
    """What one attention makes of a point; or of CLS, which has no path."""

    name: str
    weights: np.ndarray  # [F,P]
    path: np.ndarray = np.empty((0, 2))  # [F,2], pixels of the view
    weight_error: float = 0.0
    output_error: float = 0.0

    def label(self) -> list[str]:
        if self.name == EXACT:
            return ["exact attention"]
        if not len(self.path):
            return [self.name, "through all layers"]
        return [
            self.name,
            "mean squared error",
            f"of weights {self.weight_error:.1e}",
            f"of output {self.output_error:.1e}",
        ]


@dataclass(frozen=True)
class Drawing:
    """Pictures on the frames of a view, uint8 [T,H,W,3]; colours by the first of them.

    `shares_of`: the whole of which a weight is a share, in words.
    """

    pixels: np.ndarray
    grid: Grid
    pictures: Sequence[Picture]
    point: Point | None
    shares_of: str

    def strip(self) -> np.ndarray:
        """A row for each attention, a column for each frame of tokens: RGB [H,W,3]."""
        grid = self.grid
        # A token sees several frames of the video: their mean.
        means = self.pixels.reshape(grid.num_frames, grid.patch_frames, *self.pixels.shape[1:])
        means = means.mean(1).astype(np.uint8)
        heads = [text_lines([_frames(frame, grid)], TILE, FONT) for frame in range(grid.num_frames)]
        rows = [_beside([text_lines([""], LABEL_WIDTH, FONT), *heads])]
        for picture in self.pictures:
            tiles = [self._tile(image, frame, picture) for frame, image in enumerate(means)]
            rows.append(_beside([_label(picture.label(), LABEL_WIDTH, TILE), *tiles]))
        scale = self._colour_scale(rows[0].shape[1] - LABEL_WIDTH - GAP)
        meanings = ["box: the chosen patch", "line: where its attention", "goes, frame by frame"]
        legend = _label(meanings if self.point else [], LABEL_WIDTH, len(scale))
        rows.append(_beside([legend, scale]))
        return _below(rows)

    def write_strip(self, path: str) -> None:
        with atomic_write(path) as aside:
            # 256 colours are a third of the bytes; this method keeps the rare ones too.
            image = Image.fromarray(self.strip()).quantize(256, Image.Quantize.MAXCOVERAGE)
            image.save(aside, optimize=True)

    def write_video(self, path: str) -> None:
        """The attentions side by side, frame after frame."""
        columns = min(3, len(self.pictures))
        labels = [picture.label() for picture in self.pictures]
        height = len(text_lines(max(labels, key=len), TILE, FONT))
        heads = [_label(label, TILE, height) for label in labels]
        scale = self._colour_scale(columns * (TILE + GAP) - GAP)
        with atomic_write(path) as aside, closing(VideoWriter(aside, VIDEO_FPS)) as video:
            for number in [*range(len(self.pixels))] * VIDEO_ROUNDS:
                frame = number // self.grid.patch_frames
                cells = [
                    _below([head, self._tile(self.pixels[number], frame, picture)])
                    for head, picture in zip(heads, self.pictures)
                ]
                cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
                rows = [_beside(cells[i : i + columns]) for i in range(0, len(cells), columns)]
                head = text_lines([f"frame {number}"], scale.shape[1], FONT)
                video.add(_below([head, *rows, scale]))

    @property
    def _equal(self) -> float:
        """An equal share: that of exact attention, which comes first."""
        return float(self.pictures[0].weights.mean())

    @property
    def _most(self) -> float:
        """The weight of full colour: the largest of exact attention."""
        return float(self.pictures[0].weights.max())

    def _tile(self, image: np.ndarray, frame: int, picture: Picture) -> np.ndarray:
        """A picture with the heat of a frame of tokens, the path so far, and the point."""
        grid, point = self.grid, self.point
        image = cv2.resize(image, (TILE, TILE), interpolation=cv2.INTER_CUBIC)
        image = self._warm(image, picture.weights[frame].reshape(grid.side, grid.side))
        scale = TILE / (grid.side * grid.patch)
        if point is not None and point.frame // grid.patch_frames == frame:
            corner = np.array([point.x, point.y]) // grid.patch * grid.patch * scale
            opposite = corner + grid.patch * scale - 1
            cv2.rectangle(image, _pixel(corner), _pixel(opposite), (64, 220, 255), 2)
        if len(picture.path):
            _draw_path(image, picture.path[: frame + 1] * scale)
        return image

    def _warm(self, image: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """A grey picture with colour where a token gets more than an equal share."""
        beyond = (weights - self._equal) / max(self._most - self._equal, 1e-12)
        heat = beyond.clip(0, 1).astype(np.float32)
        size = image.shape[1::-1]
        return _coloured(image, cv2.resize(heat, size, interpolation=cv2.INTER_LINEAR))

    def _colour_scale(self, width: int) -> np.ndarray:
        """What the colours mean, below a picture: RGB [H, width, 3]."""
        heat = np.tile(np.linspace(0, 1, width), (FONT, 1))
        bar = _coloured(np.full((FONT, width, 3), 128), heat)
        equal = text_lines([f"equal, {self._equal:.1%}"], width, FONT)
        largest = text_lines([f"most, {self._most:.1%}"], width, FONT, right=True)
        title = text_lines(["colour: a patch's share of", self.shares_of], width, FONT)
        return _below([title, bar, np.minimum(equal, largest)])


def _frames(frame: int, grid: Grid) -> str:
    """The frames of the clip that a frame of tokens covers."""
    first = frame * grid.patch_frames
    last = first + grid.patch_frames - 1
    return f"frame {first}" if first == last else f"frames {first} to {last}"


def _draw_path(image: np.ndarray, places: np.ndarray) -> None:
    path = [_pixel(place) for place in places]
    for start, end in zip(path, path[1:]):
        cv2.line(image, start, end, PAPER, 3, cv2.LINE_AA)
        cv2.line(image, start, end, ACCENT, 2, cv2.LINE_AA)
    cv2.circle(image, path[-1], 6, PAPER, -1, cv2.LINE_AA)
    cv2.circle(image, path[-1], 4, ACCENT, -1, cv2.LINE_AA)


def _coloured(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """A picture in grey, and in colour by its heat [H,W] from 0 to 1."""
    colour = 255 * colormaps["plasma"](0.3 + 0.7 * heat)[..., :3]
    grey = 0.7 * image.mean(axis=2, keepdims=True) + 40
    share = 0.75 * heat[..., None]
    return (grey * (1 - share) + colour * share).clip(0, 255).astype(np.uint8)


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
