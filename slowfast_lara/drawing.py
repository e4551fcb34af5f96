"""Pictures: text in any script that DejaVu has, bars, and MP4 files."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from fractions import Fraction

import av
import cv2
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

# The first of these that this build of FFmpeg has.
ENCODERS = {"libx264": {"preset": "veryfast", "crf": "20"}, "mpeg4": {"qscale": "4"}}

INK, PAPER, ACCENT = (24, 28, 34), (255, 255, 255), (255, 138, 0)


class VideoWriter:
    """An MP4 of RGB images: H.264 where that can be written, else MPEG-4 part 2."""

    def __init__(self, path: str, fps: float) -> None:
        self._container = av.open(path, "w", format="mp4")
        self._fps = Fraction(min(max(fps, 1.0), 240.0)).limit_denominator(1001)
        self._stream = None

    def add(self, image: np.ndarray) -> None:
        if self._stream is None:
            self._stream = self._add_stream(*image.shape[:2])
        size = (self._stream.width, self._stream.height)
        if (image.shape[1], image.shape[0]) != size:  # odd sizes, and changes on the way
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        if self._stream is not None:
            self._container.mux(self._stream.encode())
        self._container.close()

    def _add_stream(self, height: int, width: int):
        name = next(name for name in ENCODERS if _can_encode(name))
        stream = self._container.add_stream(name, rate=self._fps, options=ENCODERS[name])
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


def text_lines(lines: Sequence[str], width: int, size: int) -> np.ndarray:
    """Dark text on white, cut at the width: RGB [H, width, 3]."""
    step = round(size * 1.4)
    image = Image.new("RGB", (width, step * len(lines) + size // 2), PAPER)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((size // 2, size // 4 + number * step), line, fill=INK, font=font(size))
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
