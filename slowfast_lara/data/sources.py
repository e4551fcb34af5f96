"""Frame sources: a video file, image files, a folder or range of images, or frames in memory."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL import Image

from slowfast_lara.data.display import RgbConverter, check_size
from slowfast_lara.data.frame_range import FrameRange
from slowfast_lara.data.regions import CropFn, FrameBuffer
from slowfast_lara.data.timestamps import TimestampCache
from slowfast_lara.data.video import (
    ClipFrames,
    FrameIndexFn,
    decoded_frames,
    has_synthesised_pts,
    header_rate,
    open_video,
    read_clip,
    read_timestamps,
    read_whole,
)
from slowfast_lara.errors import DecodeError, first_line

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True)
class FrameArray:
    """Frames in memory, uint8 RGB [T, H, W, 3]; `fps` is None if the frame rate is unknown."""

    pixels: np.ndarray
    fps: float | None = None

    def __post_init__(self) -> None:
        shape, dtype = self.pixels.shape, self.pixels.dtype
        if len(shape) != 4 or shape[3] != 3 or not shape[0] or dtype != np.uint8:
            raise DecodeError(
                f"expected frames uint8 [T, H, W, 3] with T > 0, got {dtype} {list(shape)}"
            )
        if self.fps is not None and not 0 < self.fps < float("inf"):
            raise DecodeError(f"the frames' fps is {self.fps}; must be positive and finite")
        try:
            check_size(*shape[1:3])
        except ValueError as error:
            raise DecodeError(f"frames in memory: {error}") from None


# The path of a video file, of a folder of images or of a `FrameRange`, or the paths of image files.
VideoPath = str | Sequence[str]
FrameSource = VideoPath | FrameArray


def read_frames(
    source: FrameSource,
    choose: FrameIndexFn,
    crop: CropFn,
    *,
    whole: bool,
    default_fps: float = 30,
    threads: int = 1,
    cache: TimestampCache | None = None,
) -> ClipFrames:
    """Read the frames that `choose` selects, cropped by `crop`.

    Args:
        whole: decode the whole video file, so that `choose` gets the number of decoded frames.
        default_fps: frame rate of sources without a known frame rate.
        threads: number of decoder threads for a video file (see `read_clip`).
        cache: timestamps of known video files (see `read_clip`); unused if `whole`.
    """
    stored = _stored_frames(source, default_fps)
    if stored is not None:
        frames, read_frame, fps = stored
        indices = choose(len(frames), fps)
        distinct = np.unique(indices)
        kept = FrameBuffer(len(distinct), crop)
        for index in distinct:
            kept.add(read_frame(frames[index]))
        return ClipFrames(kept.pixels, np.searchsorted(distinct, indices))
    read = read_whole if whole else partial(read_clip, cache=cache)
    return read(str(source), choose, crop, default_fps=default_fps, threads=threads)


def _stored_frames(
    source: FrameSource, default_fps: float
) -> tuple[Any, Callable[[Any], np.ndarray], float] | None:
    """Frames or image paths, the function that reads a frame from an item, and the frame rate.

    None if the source is a video file.
    """
    if isinstance(source, FrameArray):
        return source.pixels, np.asarray, source.fps or default_fps
    images: Sequence[str] | None = None
    if not isinstance(source, str):
        images = source
    elif os.path.isdir(source):
        images = list_images(source)
    elif not os.path.exists(source):
        images = FrameRange.parse(source)
    fps = images.fps if isinstance(images, FrameRange) else None
    return None if images is None else (images, read_image, fps or default_fps)


class TimedFrame(NamedTuple):
    """A frame and its display interval, in seconds from the start of the video."""

    start: float
    end: float
    pixels: np.ndarray  # uint8 RGB [H, W, 3]


@contextmanager
def open_frames(
    source: FrameSource, default_fps: float = 30
) -> Iterator[tuple[float, Iterator[TimedFrame]]]:
    """Open a source; yield its frame rate and an iterator over its frames."""
    stored = _stored_frames(source, default_fps)
    if stored is not None:
        frames, read_frame, fps = stored
        yield float(fps), at_constant_rate(map(read_frame, frames), fps)
        return
    with open_video(str(source)) as (container, stream):
        fps = header_rate(stream) or read_timestamps(str(source)).fps or default_fps
        yield fps, _timed_frames(container, stream, fps)


def at_constant_rate(frames: Iterable[np.ndarray], fps: float) -> Iterator[TimedFrame]:
    for number, pixels in enumerate(frames):
        yield TimedFrame(number / fps, (number + 1) / fps, pixels)


def _timed_frames(container: Any, stream: Any, fps: float) -> Iterator[TimedFrame]:
    """Yield all frames of a video. Call within `open_video`, which adds the path to errors.

    A frame ends where the next one starts; the last frame has its stored duration, or 1 / fps. A
    frame starts 1 / fps after the start of the previous frame if its timestamp is missing or not
    later than that start. If the first timestamp is missing or FFmpeg synthesises the timestamps,
    all frames but the last take 1 / fps.
    """
    frames, to_rgb = decoded_frames(container, stream), RgbConverter(stream)
    frame = next(frames, None)
    if frame is None:
        raise ValueError("no frame decodes")
    if has_synthesised_pts(container, stream):  # no stored timestamps: assume a constant rate
        everything = itertools.chain([frame], frames)
        yield from at_constant_rate(map(to_rgb, everything), fps)
        return
    first_pts, start = frame.pts, 0.0
    for following in frames:
        end = start + 1 / fps
        if first_pts is not None and following.pts is not None:
            elapsed = float((following.pts - first_pts) * stream.time_base)
            end = elapsed if elapsed > start else end
        yield TimedFrame(start, end, to_rgb(frame))
        frame, start = following, end
    last = float(frame.duration * stream.time_base) if frame.duration else 1 / fps
    yield TimedFrame(start, start + last, to_rgb(frame))


def list_images(folder: str) -> list[str]:
    """The images in a folder in natural order: 2.jpg before 10.jpg."""
    try:
        names = [
            name
            for name in os.listdir(folder)
            if name.lower().endswith(IMAGE_SUFFIXES) and name[0] != "."
        ]
    except OSError as error:
        raise DecodeError(f"{folder}: {error.strerror}") from None
    if not names:
        raise DecodeError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)}) in this folder")
    names.sort(
        key=lambda name: [
            (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
        ]
    )
    return [os.path.join(folder, name) for name in names]


def read_image(path: str) -> np.ndarray:
    """Read an image file as uint8 RGB [H, W, 3]."""
    if not os.path.isfile(path):  # OpenCV would block on a FIFO
        raise DecodeError(f"{path}: no such file, or not a regular file")
    try:
        with Image.open(path) as header:  # Pillow reads only the header here
            check_size(header.height, header.width)
        image = cv2.imread(path, cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise DecodeError(f"{path}: {error.err}") from None
    except Image.UnidentifiedImageError:
        image = None
    except Exception as error:  # Pillow raises many exception types on a damaged header
        raise DecodeError(f"{path}: {first_line(error)}") from None
    if image is None:
        raise DecodeError(f"{path}: cannot be read as an image")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
