"""Pictures: text in any script that DejaVu has, plots, bars, and MP4 files."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import av
import cv2
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from slowfast_lara.errors import RunError
from slowfast_lara.files import atomic_write

# The first of these that this build of FFmpeg has.
ENCODERS = {"libx264": {"preset": "veryfast", "crf": "20"}, "mpeg4": {"qscale": "4"}}

INK, PAPER, ACCENT = (24, 28, 34), (255, 255, 255), (255, 138, 0)


@contextlib.contextmanager
def saved_figure(
    path: str | os.PathLike[str], size: tuple[float, float], columns: int = 1
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A figure of plots side by side, to draw on; at the end it is written aside and renamed.

    It is made without pyplot, so that it needs no screen and no closing.
    """
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    yield figure, axes
    with atomic_write(path) as aside:
        figure.savefig(aside, dpi=120)


def lines_or_bars(
    axis: Axes,
    xs: Sequence[float] | np.ndarray,
    values: Mapping[str, Sequence[float] | np.ndarray],
    style: str,
) -> None:
    """A line for each name over the xs; if there is only one x, a bar for each, with its number."""
    names = [plain_text(name) for name in values]
    if len(xs) > 1:
        for name, ys in zip(names, values.values()):
            axis.plot(xs, ys, style, label=name)
        return
    places = range(len(names))
    colours = [f"C{place % 10}" for place in places]
    bars = axis.barh(places, [ys[0] for ys in values.values()], color=colours)
    axis.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
    axis.margins(x=0.15)
    axis.set_yticks(places, names)
    axis.invert_yaxis()


def plain_text(text: str) -> str:
    """For matplotlib, which reads dollars as mathematics, and a leading _ as "no legend"."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


class VideoWriter:
    """An MP4 of RGB images: H.264 where that can be written, else MPEG-4 part 2."""

    def __init__(self, path: str, fps: float) -> None:
        self._container = av.open(path, "w", format="mp4")
        self._fps = Fraction(min(max(fps, 1.0), 240.0)).limit_denominator(1001)
        self._stream: av.VideoStream | None = None
        self._failed = False

    def add(self, image: np.ndarray) -> None:
        stream = self._stream = self._stream or self._add_stream(*image.shape[:2])
        size = (stream.width, stream.height)
        if (image.shape[1], image.shape[0]) != size:  # odd sizes, and changes on the way
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
        """Once something could not be written (a full disk), FFmpeg crashes if it gets more."""
        try:
            yield
        except av.FFmpegError as error:
            self._failed = True
            raise RunError(f"a video cannot be written: {error.strerror}") from None

    def _add_stream(self, height: int, width: int) -> av.VideoStream:
        name = next(name for name in ENCODERS if _can_encode(name))
        stream = self._container.add_stream(name, rate=self._fps, options=ENCODERS[name])
        assert isinstance(stream, av.VideoStream)  # all of ENCODERS are of videos
        stream.width, stream.height = max(2, width // 2 * 2), max(2, height // 2 * 2)
        stream.pix_fmt = "yuv420p"
        return stream


def _can_encode(name: str) -> bool:
    try:
        av.Codec(name, "w")
    except (ValueError, av.FFmpegError):
        return False
    return True


@functools.lru_cache(maxsize=8)
def font(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib's own copy of DejaVu Sans: there on every system."""
    return ImageFont.truetype(
        os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size
    )


def text_lines(lines: Sequence[str], width: int, size: int, *, right: bool = False) -> np.ndarray:
    """Dark text on white, cut at the width, to the left or the right: RGB [H, width, 3]."""
    step = round(size * 1.4)
    image = Image.new("RGB", (width, step * len(lines) + size // 2), PAPER)
    draw = ImageDraw.Draw(image)
    x, anchor = (width - size // 2, "ra") if right else (size // 2, "la")
    for number, line in enumerate(lines):
        place = x, size // 4 + number * step
        draw.text(place, line, fill=INK, font=font(size), anchor=anchor)
    return np.asarray(image)


def score_panel(
    names: Sequence[str], scores: Sequence[float], rows: int, width: int, size: int
) -> np.ndarray:
    """A line for each class with a bar behind it: RGB [H, width, 3]."""
    step = round(size * 1.5)
    image = Image.new("RGB", (width, step * rows + size // 2), INK)
    draw = ImageDraw.Draw(image)
    for number, (name, score) in enumerate(zip(names[:rows], scores)):
        top = size // 4 + number * step
        draw.rectangle((0, top, score * width, top + step - 2), fill=(150, 82, 10))
        draw.text((size // 2, top), f"{score:4.0%}  {name}", fill=PAPER, font=font(size))
    return np.asarray(image)


def enlarge(image: np.ndarray, side: int) -> np.ndarray:
    """Scaled up, if need be, so that the longer side is at least `side`."""
    factor = side / max(image.shape[:2])
    if factor <= 1:
        return image
    size = (round(image.shape[1] * factor), round(image.shape[0] * factor))
    return cv2.resize(image, size, interpolation=cv2.INTER_CUBIC)
