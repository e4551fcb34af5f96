"""Figures (PNG) and videos (MP4) that show attention as heat maps over the frames."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
from matplotlib import colormaps
from PIL import Image

from slowfast_lara.drawing import PAPER, VideoWriter, attention_colour, text_lines
from slowfast_lara.files import atomic_write
from slowfast_lara.models.attention_config import EXACT
from slowfast_lara.visualization.token_grid import QueryPoint, TokenGrid

TILE = 168
GAP = 4
LABEL_WIDTH = 190
FONT = 13
QUERY_COLOUR = (64, 220, 255)
VIDEO_FPS, VIDEO_REPEATS = 4, 3


class AttentionMap(NamedTuple):
    """Attention weights of a query point in one layer, or the attention rollout of CLS."""

    name: str
    label: str
    weights: np.ndarray  # [F,P]: F temporal tokens, P patches per frame
    path: np.ndarray = np.empty((0, 2))  # [F,2], (x, y) in pixels; empty for CLS
    weight_error: float = 0.0
    output_error: float = 0.0

    def text(self) -> list[str]:
        if self.name == EXACT:
            return ["exact attention"]
        if not len(self.path):
            return [self.label, "through all layers"]
        return [
            self.label,
            "mean squared error",
            f"of weights {self.weight_error:.1e}",
            f"of output {self.output_error:.1e}",
        ]


@dataclass(frozen=True)
class HeatMapFigure:
    """Attention maps over the frames of a view, `pixels` uint8 [T,H,W,3].

    All maps have the colour scale of the first map. `total` is what 100 % means in the caption of
    the colour scale, e.g. "all attention".
    """

    pixels: np.ndarray
    grid: TokenGrid
    maps: Sequence[AttentionMap]
    point: QueryPoint | None
    total: str

    def strip(self) -> np.ndarray:
        """Draw an RGB image [H,W,3]: a row per attention method, a column per temporal token."""
        grid = self.grid
        # A temporal token covers `patch_frames` frames: show the mean of these frames.
        means = self.pixels.reshape(grid.num_frames, grid.patch_frames, *self.pixels.shape[1:])
        means = means.mean(1).astype(np.uint8)
        titles = [text_lines([frame_range(i, grid)], TILE, FONT) for i in range(grid.num_frames)]
        rows = [_hstack([text_lines([""], LABEL_WIDTH, FONT), *titles])]
        for attention in self.maps:
            tiles = [self._tile(image, i, attention) for i, image in enumerate(means)]
            rows.append(_hstack([_caption(attention, LABEL_WIDTH, TILE), *tiles]))
        scale = self._colour_scale(rows[0].shape[1] - LABEL_WIDTH - GAP)
        legend = ["box: the query", "line: centre of its attention", "up to this frame"]
        text = _pad(text_lines(legend if self.point else [], LABEL_WIDTH, FONT), len(scale))
        return _vstack([*rows, _hstack([text, scale])])

    def write_strip(self, path: str) -> None:
        with atomic_write(path) as temporary:
            # A palette of 256 colours reduces the file to a third; MAXCOVERAGE keeps rare colours.
            image = Image.fromarray(self.strip()).quantize(256, Image.Quantize.MAXCOVERAGE)
            image.save(temporary, optimize=True)

    def write_video(self, path: str) -> None:
        """Write a video of the clip's frames with all attentions side by side."""
        columns = min(3, len(self.maps))
        height = max(len(text_lines(attention.text(), TILE, FONT)) for attention in self.maps)
        captions = [_caption(attention, TILE, height) for attention in self.maps]
        scale = self._colour_scale(columns * (TILE + GAP) - GAP)
        with atomic_write(path) as temporary, closing(VideoWriter(temporary, VIDEO_FPS)) as video:
            for number in [*range(len(self.pixels))] * VIDEO_REPEATS:
                frame = number // self.grid.patch_frames
                cells = [
                    _vstack([caption, self._tile(self.pixels[number], frame, attention)])
                    for caption, attention in zip(captions, self.maps)
                ]
                cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
                rows = [_hstack(cells[i : i + columns]) for i in range(0, len(cells), columns)]
                title = text_lines([f"frame {number}"], scale.shape[1], FONT)
                video.add(_vstack([title, *rows, scale]))

    def _tile(self, image: np.ndarray, frame: int, attention: AttentionMap) -> np.ndarray:
        """A frame with its heat map, the attention path up to this frame, and the query's patch."""
        grid, point = self.grid, self.point
        image = cv2.resize(image, (TILE, TILE), interpolation=cv2.INTER_CUBIC)
        weights = attention.weights[frame].reshape(grid.side, grid.side)
        mean, largest = self._range()
        heat = ((weights - mean) / max(largest - mean, 1e-12)).clip(0, 1).astype(np.float32)
        image = heat_coloured(image, cv2.resize(heat, (TILE, TILE)))  # bilinear
        scale = TILE / (grid.side * grid.patch)
        if point is not None and point.frame // grid.patch_frames == frame:
            corner = np.array([point.x, point.y]) // grid.patch * grid.patch * scale
            box = np.stack((corner, corner + grid.patch * scale - 1))
            first, last = box.round().astype(int).tolist()
            cv2.rectangle(image, first, last, QUERY_COLOUR, 2)
        if len(attention.path):
            path = (attention.path[: frame + 1] * scale).round().astype(int)
            # White outline, so that the coloured line is visible on any frame.
            for width, radius, ink in ((4, 6, PAPER), (2, 4, attention_colour(attention.name))):
                cv2.polylines(image, [path], False, ink, width, cv2.LINE_AA)
                cv2.circle(image, path[-1].tolist(), radius, ink, -1, cv2.LINE_AA)
        return image

    def _range(self) -> tuple[float, float]:
        """The ends of the colour scale: the mean and the largest weight of the first map."""
        weights = self.maps[0].weights
        return float(weights.mean()), float(weights.max())

    def _colour_scale(self, width: int) -> np.ndarray:
        """Draw the legend of the colour scale: RGB [H, width, 3]."""
        mean, largest = self._range()
        heat = np.tile(np.linspace(0, 1, width), (FONT, 1))
        bar = heat_coloured(np.full((FONT, width, 3), 128), heat)
        left = text_lines([f"mean, {mean:.1%}"], width, FONT)
        right = text_lines([f"largest, {largest:.1%}"], width, FONT, right=True)
        title = text_lines(["colour: a patch's share of", self.total], width, FONT)
        return _vstack([title, bar, np.minimum(left, right)])


def frame_range(frame: int, grid: TokenGrid) -> str:
    """Title of a temporal token: the frames that it covers, e.g. "frames 2 to 3"."""
    first = frame * grid.patch_frames
    last = first + grid.patch_frames - 1
    return f"frame {first}" if first == last else f"frames {first} to {last}"


def heat_coloured(image: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Convert an image to grey and overlay a heat map; `heat` [H,W] is from 0 to 1."""
    colour = 255 * colormaps["plasma"](0.3 + 0.7 * heat)[..., :3]
    grey = 0.7 * image.mean(axis=2, keepdims=True) + 40
    alpha = 0.75 * heat[..., None]
    return (grey * (1 - alpha) + colour * alpha).clip(0, 255).astype(np.uint8)


def _caption(attention: AttentionMap, width: int, height: int) -> np.ndarray:
    """The caption of an attention map, with a bar of the attention's colour at the left."""
    text = text_lines(attention.text(), width, FONT).copy()
    if len(attention.path):
        text[:, : GAP - 1] = attention_colour(attention.name)
    return _pad(text, height)


def _pad(image: np.ndarray, height: int) -> np.ndarray:
    return np.pad(image, ((0, max(height - len(image), 0)), (0, 0), (0, 0)), constant_values=255)


def _hstack(tiles: Sequence[np.ndarray]) -> np.ndarray:
    gap = np.full((len(tiles[0]), GAP, 3), 255, np.uint8)
    return np.concatenate([part for tile in tiles for part in (tile, gap)][:-1], axis=1)


def _vstack(rows: Sequence[np.ndarray]) -> np.ndarray:
    gap = np.full((GAP, rows[0].shape[1], 3), 255, np.uint8)
    return np.concatenate([part for row in rows for part in (row, gap)][:-1])
