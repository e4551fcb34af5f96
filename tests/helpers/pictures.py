"""Videos of smooth pictures with a display matrix, colour properties or variable timestamps."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.stream import Disposition


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
    pixel_aspect: Fraction | None = None,
    turn: int = 0,
    mirror: bool = False,
    colors: tuple[int, int] | None = None,
) -> Path:
    """Write a video; `colors` are the colour space and range."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = pix_fmt
        if turn or mirror:
            stream.set_display_rotation(turn, hflip=mirror)
        if pixel_aspect:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        if colors:
            stream.codec_context.colorspace, stream.codec_context.color_range = colors
        if milliseconds:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(*size, number), format="rgb24")
            if colors:
                frame = frame.reformat(
                    format=pix_fmt, dst_colorspace=colors[0], dst_color_range=colors[1]
                )
            if milliseconds:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    restore_scheduling()
    return path


def restore_scheduling() -> None:
    """Undo the real-time priority that SVT-AV1 gives to all of root's threads.

    Other test processes would starve.
    """
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def upright(turn: int, mirror: bool):
    """Display transform of FFmpeg: rotate counter-clockwise, then mirror."""
    return lambda image: np.rot90(image, turn // 90)[:, :: -1 if mirror else 1]


def write_with_cover(path: Path, frames: int = 20) -> Path:
    """Write an mp4 file whose first video stream is a cover picture."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 96, 128, "yuv420p"
        cover = container.add_stream("mjpeg", rate=1)
        cover.height, cover.width, cover.pix_fmt = 32, 32, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        container.start_encoding()
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(96, 128, number), format="rgb24")
            container.mux(stream.encode(frame))
        gray = np.full((32, 32, 3), 99, np.uint8)
        container.mux(cover.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")))
        for encoder in (stream, cover):
            container.mux(encoder.encode())
    # The cover is in `udta`; move this box before the tracks.
    content = b""
    for kind, box in _boxes(path.read_bytes()):
        if kind == b"moov":
            parts = sorted(_boxes(box[8:]), key=lambda part: part[0] == b"trak")
            box = box[:8] + b"".join(part for _, part in parts)
        content += box
    path.write_bytes(content)
    return path


def _boxes(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Type and bytes of each box of an mp4 file or of a box's content."""
    offset = 0
    while offset < len(content):
        size, kind = struct.unpack_from(">I4s", content, offset)
        yield kind, content[offset : offset + size]
        offset += size
