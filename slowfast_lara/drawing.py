"""Figures, text images and MP4 files."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import av
import cv2
import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from slowfast_lara.errors import RunError
from slowfast_lara.files import atomic_write

INK, PAPER, ACCENT = (24, 28, 34), (255, 255, 255), (255, 138, 0)
# Colour of each attention in all figures, as an index into matplotlib's colormap tab20. An even
# index is a dark colour; the next index is its light shade.
_ATTENTION_COLOURS = {
    "softmax": 0,
    "lara": 2,
    "lara-recommended": 3,
    "ra": 4,
    "performer": 6,
    "nystrom": 8,
    "orthoformer": 10,
    "merged": 12,
    "tome": 14,
    "pooled": 16,
    "eva": 18,
}
_OTHER_COLOURS = (1, 5, 7, 9, 11, 13, 15, 17, 19)  # for attentions not listed above
_ALIASES = {"exact": "softmax", "none": "softmax", "nyströmformer": "nystrom"}


def attention_colour(label: str) -> tuple[int, int, int]:
    """The RGB colour of an attention; `label` starts with its name, e.g. "lara (as trained)"."""
    word = re.split("[ ,_(]", label.lower())[0]
    is_recommended = re.match("lara.*recommended", label.lower())
    word = "lara-recommended" if is_recommended else _ALIASES.get(word, word)
    other = _OTHER_COLOURS[zlib.crc32(word.encode()) % len(_OTHER_COLOURS)]
    red, green, blue, _ = colormaps["tab20"](_ATTENTION_COLOURS.get(word, other), bytes=True)
    return int(red), int(green), int(blue)


def attention_styles(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Arguments of `Axes.plot` for each label: colour, line style and marker.

    Variants of one attention have the same colour and differ in line style and marker.
    """
    seen: Counter[tuple[int, int, int]] = Counter()
    styles = []
    for label in labels:
        colour = attention_colour(label)
        number = seen[colour]
        seen[colour] += 1
        line, marker = ("-", "--", ":", "-.")[number % 4], "os^Dv"[number % 5]
        color = "#{:02x}{:02x}{:02x}".format(*colour)
        styles.append({"color": color, "ls": line, "marker": marker})
    return styles


@contextlib.contextmanager
def saved_figure(
    path: str | os.PathLike[str], size: tuple[float, float], columns: int = 1
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """Yield a figure with a row of axes; write the figure to `path` when the context ends."""
    # Without pyplot, a figure needs no display and need not be closed.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    yield figure, axes
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120)


def lines_or_bars(
    axis: Axes,
    xs: Sequence[float] | np.ndarray,
    values: Mapping[str, Sequence[float] | np.ndarray],
    styles: Sequence[Mapping[str, Any]],
) -> None:
    """Plot one line per name over `xs`, or one labelled bar per name if `xs` has a single value.

    `styles` are the arguments of `Axes.plot` for each name; bars use the colour only.
    """
    names = [plain_text(name) for name in values]
    if len(xs) > 1:
        for name, ys, style in zip(names, values.values(), styles):
            axis.plot(xs, ys, label=name, **style)
        return
    rows = range(len(names))
    colors = [style["color"] for style in styles]
    bars = axis.barh(rows, [ys[0] for ys in values.values()], color=colors)
    axis.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
    axis.margins(x=0.15)
    axis.set_yticks(rows, names)
    axis.invert_yaxis()


def plain_text(text: str) -> str:
    """Escape matplotlib's markup: $ starts mathtext, and a leading _ hides a legend entry."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


class VideoWriter:
    """Encodes RGB images as an H.264 MP4 file."""

    def __init__(self, path: str, fps: float) -> None:
        self._container = av.open(path, "w", format="mp4")
        self._fps = Fraction(min(max(fps, 1.0), 240.0)).limit_denominator(1001)
        self._stream: av.VideoStream | None = None
        self._failed = False

    def add(self, image: np.ndarray) -> None:
        stream = self._stream
        if stream is None:
            options = {"preset": "veryfast", "crf": "20"}
            stream = self._container.add_stream("libx264", rate=self._fps, options=options)
            # 4:2:0 chroma subsampling needs an even width and height.
            stream.height, stream.width = (max(2, side // 2 * 2) for side in image.shape[:2])
            stream.pix_fmt = "yuv420p"
            self._stream = stream
        size = (stream.width, stream.height)
        if (image.shape[1], image.shape[0]) != size:  # odd size, or not that of the first image
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        with self._one_line_errors():
            self._container.mux(stream.encode(frame))

    def close(self) -> None:
        with self._one_line_errors():
            try:
                if self._stream is not None and not self._failed:
                    self._container.mux(self._stream.encode())
            finally:
                self._container.close()

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        try:
            yield
        except av.FFmpegError as error:
            self._failed = True  # FFmpeg crashes if it writes again after the disk was full
            raise RunError(f"cannot write the video: {error.strerror}") from None


@functools.lru_cache(maxsize=8)
def font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans as shipped with matplotlib."""
    path = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(path, size)


def text_lines(lines: Sequence[str], width: int, size: int, *, right: bool = False) -> np.ndarray:
    """Draw dark text on white, clipped to `width`, left- or right-aligned: RGB [H, width, 3]."""
    step = round(size * 1.4)
    image = Image.new("RGB", (width, step * len(lines) + size // 2), PAPER)
    draw = ImageDraw.Draw(image)
    x, anchor = (width - size // 2, "ra") if right else (size // 2, "la")
    for number, line in enumerate(lines):
        top = size // 4 + number * step
        draw.text((x, top), line, fill=INK, font=font(size), anchor=anchor)
    return np.asarray(image)


def score_panel(
    names: Sequence[str], scores: Sequence[float], rows: int, width: int, size: int
) -> np.ndarray:
    """RGB image with a bar and name for the first `rows` classes; a score of 1 fills the width."""
    step = round(size * 1.5)
    image = Image.new("RGB", (width, step * rows + size // 2), INK)
    draw = ImageDraw.Draw(image)
    for number, (name, score) in enumerate(zip(names[:rows], scores)):
        top = size // 4 + number * step
        draw.rectangle((0, top, score * width, top + step - 2), fill=(150, 82, 10))
        draw.text((size // 2, top), f"{score:4.0%}  {name}", fill=PAPER, font=font(size))
    return np.asarray(image)


def enlarge(image: np.ndarray, side: int) -> np.ndarray:
    """Enlarge an image so that its longer side has at least `side` pixels."""
    factor = side / max(image.shape[:2])
    if factor <= 1:
        return image
    size = (round(image.shape[1] * factor), round(image.shape[0] * factor))
    return cv2.resize(image, size, interpolation=cv2.INTER_CUBIC)
