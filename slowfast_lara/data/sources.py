"""Frame sources: a video file, image files, a folder or range of images, or frames in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import cv2
import numpy as np
from PIL import Image

from slowfast_lara.data.frame_range import FrameRange
from slowfast_lara.data.timestamps import TimestampCache
from slowfast_lara.data.video import (
    ClipFrames,
    CropFn,
    FrameBuffer,
    FrameIndexFn,
    check_size,
    open_video,
    read_clip,
    read_timestamps,
    read_whole,
    rgb_frames,
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
            raise DecodeError(f"expected frames uint8 [T, H, W, 3], got {dtype} {list(shape)}")
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
        default_fps: frame rate of sources that have none.
        threads, cache: only for video files; see `read_clip`.
    """
    if isinstance(source, FrameArray):
        indices = choose(len(source.pixels), source.fps or default_fps)
        return _read_cropped(indices, source.pixels.__getitem__, crop)
    images = _image_files(source)
    if images is not None:
        indices = choose(len(images), _fps_of(images, default_fps))
        return _read_cropped(indices, lambda index: read_image(images[index]), crop)
    read = read_whole if whole else partial(read_clip, cache=cache)
    return read(str(source), choose, crop, default_fps=default_fps, threads=threads)


def _read_cropped(
    indices: np.ndarray, read_frame: Callable[[int], np.ndarray], crop: CropFn
) -> ClipFrames:
    distinct = np.unique(indices)
    kept = FrameBuffer(len(distinct), crop)
    for index in distinct:
        kept.add(read_frame(index))
    return ClipFrames(kept.pixels, np.searchsorted(distinct, indices))


@contextmanager
def open_frames(
    source: FrameSource, default_fps: float = 30
) -> Iterator[tuple[float, Iterator[np.ndarray]]]:
    """Open a source; yield its frame rate and an iterator over its frames, uint8 RGB [H, W, 3]."""
    if isinstance(source, FrameArray):
        yield float(source.fps or default_fps), iter(source.pixels)
        return
    images = _image_files(source)
    if images is not None:
        yield float(_fps_of(images, default_fps)), map(read_image, images)
        return
    fps = read_timestamps(str(source)).fps or default_fps
    with open_video(str(source)) as (container, stream):
        yield float(fps), rgb_frames(container, stream)


def _image_files(source: VideoPath) -> Sequence[str] | None:
    """The image files of a source; None if the source is a video file."""
    if not isinstance(source, str):
        return source
    if os.path.isdir(source):
        return list_images(source)
    return None if os.path.exists(source) else FrameRange.parse(source)


def _fps_of(images: Sequence[str], default_fps: float) -> float:
    return (images.fps if isinstance(images, FrameRange) else None) or default_fps


def list_images(folder: str) -> list[str]:
    """The images in a folder in natural order: 2.jpg before 10.jpg."""
    try:
        names = [name for name in os.listdir(folder) if name.lower().endswith(IMAGE_SUFFIXES)]
    except OSError as error:
        raise DecodeError(f"{folder}: {error.strerror}") from None
    if not names:
        raise DecodeError(f"{folder}: no images ({', '.join(IMAGE_SUFFIXES)}) in it")
    names.sort(
        key=lambda name: [
            (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
        ]
    )
    return [os.path.join(folder, name) for name in names]


def read_image(path: str) -> np.ndarray:
    """Read an image file as uint8 RGB [H, W, 3]."""
    if not os.path.isfile(path):  # OpenCV would block on a FIFO
        raise DecodeError(f"{path}: no such file")
    try:
        with Image.open(path) as header:  # reads only the header
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
