"""Videos of smooth pictures with a display matrix, colour properties or variable timestamps."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def picture(height: int, width: int, number: int) -> np.ndarray:
    """A smooth picture with a different colour in every corner, and a moving bar."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    image = np.stack([y * 200 + 20, x * 200 + 20, (1 - x) * y * 200 + 20], axis=-1)
    left = number * width // 40
    image[:, left : left + width // 8] += 30
    return image.clip(0, 255).astype(np.uint8)


def write_pictures(
    path: Path,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    *,
    frames: int = 35,
    size: tuple[int, int] = (96, 128),
    rate: Fraction = Fraction(25),
    milliseconds: list[int] | None = None,
    options: dict[str, str] | None = None,
    turn: int = 0,
    mirror: bool = False,
) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = pix_fmt
        if turn or mirror:
            stream.set_display_rotation(turn, hflip=mirror)
        if milliseconds:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(*size, number), format="rgb24")
            if milliseconds:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def upright(turn: int, mirror: bool):
    """Display transform of FFmpeg: rotate counter-clockwise, then mirror."""
    return lambda image: np.rot90(image, turn // 90)[:, :: -1 if mirror else 1]
