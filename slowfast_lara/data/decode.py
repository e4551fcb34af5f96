"""Frames of a video file: only the wanted ones become RGB, resized at once.

The caller says which frames it wants by a function of (number of frames, fps),
because the number is known only here: what a file's header says is often wrong.
Packets are counted first, which costs a few milliseconds, or known from an index, then
- `read_span` (training) seeks to the key frame before the first wanted frame
  and decodes up to the last one, or reads the packets that it knows, and
- `read_all` (testing) decodes everything and, should fewer frames decode than
  there are packets, chooses again by the true number. Of H.264 it leaves out what nobody
  wants and no other frame refers to: a packet of it is a frame.
Frames that nobody wants are dropped as they come: memory does not grow with
the length of the video.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import av
import cv2
import numpy as np
from av.video.reformatter import VideoReformatter

from slowfast_lara.data.h264 import referenced_frames
from slowfast_lara.data.orientation import Orientation
from slowfast_lara.data.packet_index import PacketIndex, Version, version_of
from slowfast_lara.data.packets import DAMAGE, Packets, StoredPackets, demux, scan, stored_frames
from slowfast_lara.errors import DecodeError

# Videos are read in parallel by the loaders' workers: OpenCV needs no threads beside
# them. Set here, before a worker is forked: in a forked process the call waits for ever
# for threads that only its parent has.
cv2.setNumThreads(0)

# (number of frames, frames per second) -> the wanted frame indices, any shape.
Choose = Callable[[int, float], np.ndarray]


class Region(NamedTuple):
    """A rectangle of a frame, and the size to keep it in."""

    top: int
    left: int
    height: int
    width: int
    out_height: int
    out_width: int


# (height, width) of the frames -> what to keep of them.
Place = Callable[[int, int], Region]

# Containers of video. Left to itself, FFmpeg also draws text files as ANSI art,
# and follows playlists to other files and hosts.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,asf,mpegts,mpeg,mpegvideo,m4v,h264,hevc,"
    "ogg,gif,ivf,nut,mxf,dv,rm,swf,mjpeg,yuv4mpegpipe,vvc,av1,obu,wtv"
)
# A damaged header may ask for any size; 8K video has 33 million pixels.
MAX_PIXELS = 8192 * 8192
# Frames are scaled by their shorter side, so it is the longer one that takes the memory: up
# to this many times the shorter one, the frames of a test take less than its views. The
# widest screens have 32:9.
MAX_ASPECT = 8
# Of a video whose length is limited in seconds: few cameras have more.
MOST_FPS = 120
# From PyAV 17 on, a conversion starts a thread for each core unless told not to.
ONE_THREAD = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}


class Frames(NamedTuple):
    """Distinct frames, uint8 RGB [U, H, W, 3], and which of them each wanted index is."""

    pixels: np.ndarray
    order: np.ndarray


def read_span(
    path: str,
    choose: Choose,
    place: Place,
    *,
    default_fps: float = 30,
    threads: int = 1,
    index: PacketIndex | None = None,
) -> Frames:
    """The chosen frames, decoding from the key frame before them.

    With an `index`, a video is scanned once, and not again while it stays the same.
    """
    version, packets = (None, None) if index is None else index.find(path)
    if packets is not None and packets.stored is not None and packets.pts is not None:
        indices = choose(packets.num_frames, packets.fps or default_fps)
        wanted = packets.pts[np.unique(indices)]
        pixels = _decode_stored(path, version, packets.stored, wanted, place, threads)
        if pixels is not None:
            return Frames(pixels, order_of(indices))
    with opened(path, threads) as (container, stream):
        if packets is None:
            packets = scanned(path, container, stream, with_places=version is not None)
            if index is not None and version is not None:
                index.add(path, version, packets)
        if packets.pts is not None:
            indices = choose(packets.num_frames, packets.fps or default_fps)
            wanted = packets.pts[np.unique(indices)]
            pixels = _decode_pts(container, stream, wanted, place)
            if pixels is not None:
                return Frames(pixels, order_of(indices))
    # Timestamps that do not tell the frames apart, or frames that are not there.
    return read_all(path, choose, place, default_fps=default_fps, threads=threads)


def read_all(
    path: str, choose: Choose, place: Place, *, default_fps: float = 30, threads: int = 1
) -> Frames:
    """The chosen frames, chosen by the number that really decodes."""
    with opened(path, threads) as (container, stream):
        packets = scanned(path, container, stream)
        is_h264 = stream.codec_context.name == "h264"
    guess, fps = packets.num_frames, packets.fps or default_fps
    if is_h264 and packets.pts is not None:
        indices = choose(guess, fps)
        wanted = packets.pts[np.unique(indices)]
        with opened(path, threads) as (container, stream):
            pixels = _decode_referenced(container, stream, wanted, int(packets.pts[0]), place)
        if pixels is not None:
            return Frames(pixels, order_of(indices))
    for _ in range(2):
        with opened(path, threads) as (container, stream):
            wanted = np.unique(choose(guess, fps))
            pixels, count = _decode_all(container, stream, wanted, place)
        if count == 0:
            raise DecodeError(f"{path}: no frame decodes")
        indices = choose(count, fps)
        # A wrong guess does no harm where it has not missed a frame, as in short videos.
        if np.isin(indices, wanted).all():
            return Frames(pixels, np.searchsorted(wanted, indices))
        guess = count
    raise DecodeError(f"{path}: decodes differently every time")


def scanned(path: str, container: Any, stream: Any, *, with_places: bool = False) -> Packets:
    packets = scan(container, stream, path if with_places else None)
    if not packets.num_frames:
        raise DecodeError(f"{path}: no frame decodes")
    return packets


def count_frames(path: str) -> tuple[int, int]:
    """How many frames decode, and how many packets do not."""
    errors: list[str] = []
    count = 0
    with opened(path, 1) as (container, stream):
        for frame in decoded_frames(container, stream, errors):
            check_size(frame.height, frame.width)
            count += 1
    if not count:
        raise DecodeError(f"{path}: no frame decodes")
    return count, len(errors)


def check_length(path: str, most_seconds: float) -> None:
    """A DecodeError if a video is longer, by its timestamps or by the number of its frames.

    Nothing is decoded, and what lies beyond the limit is not read.
    """
    most_frames = most_seconds * MOST_FPS
    with opened(path, 1) as (container, stream):
        first = None
        for count, packet in enumerate(demux(container, stream), start=1):
            if packet.pts is not None:
                first = packet.pts if first is None else first
                seconds = float((packet.pts - first) * stream.time_base)
            else:
                seconds = 0.0
            if seconds > most_seconds or count > most_frames:
                raise DecodeError(
                    f"{path}: longer than {most_seconds:g} seconds or {most_frames:g} frames"
                )


@contextmanager
def opened(path: str, threads: int) -> Iterator[tuple[Any, Any]]:
    """The open container and its video stream; everything PyAV raises is a DecodeError."""
    container = None
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a FIFO would wait for ever
            raise DecodeError(f"{path}: not a file")
        container = open_container(path)
        yield container, _video_stream(container, path, threads)
    except DecodeError:
        raise
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DecodeError(f"{path}: {' '.join(reason.split())}") from None
    finally:
        if container is not None:
            container.close()


def open_container(path: str) -> Any:
    # "file:" because FFmpeg would take "a:b.mp4" for the protocol "a".
    return av.open(
        f"file:{os.path.abspath(path)}",
        options={"protocol_whitelist": "file", "format_whitelist": CONTAINERS},
        metadata_errors="replace",
    )


def _video_stream(container: Any, path: str, threads: int) -> Any:
    for stream in container.streams.video:
        cover_picture = "attached_pic" in str(getattr(stream, "disposition", ""))
        if cover_picture or stream.codec_context is None:
            continue
        # By the header, before a decoder takes memory; frames are looked at one by one later.
        if stream.codec_context.width and stream.codec_context.height:
            check_size(stream.codec_context.height, stream.codec_context.width)
        stream.codec_context.thread_count = threads
        if threads != 1:
            stream.codec_context.thread_type = "AUTO"
        return stream
    raise DecodeError(f"{path}: no video stream that can be decoded")


def decoded_frames(container: Any, stream: Any, errors: list[str] | None = None) -> Iterator[Any]:
    """Decoded frames in order; packets that will not decode are passed over."""
    for packet in demux(container, stream):
        try:
            frames = packet.decode()
        except DAMAGE as error:
            if errors is not None:
                errors.append(str(error))
            continue
        yield from frames


def frames_among(container: Any, stream: Any, wanted: set[int]) -> Iterator[Any]:
    """Decoded frames, the wanted timestamps among them.

    Frames that nobody wants and no other refers to are not decoded. When all of
    the wanted packets are in, the decoder gives out what it holds.
    """
    context, missing = stream.codec_context, len(wanted)
    for packet in demux(container, stream):
        needed = packet.pts in wanted
        context.skip_frame = "DEFAULT" if needed else "NONREF"
        missing -= needed
        try:
            yield from packet.decode()
            if not missing:
                yield from stream.decode(None)
                return
        except DAMAGE:
            return


def _decode_pts(container: Any, stream: Any, wanted: np.ndarray, place: Place) -> np.ndarray | None:
    """The frames with the wanted timestamps; None if they do not all come, in order."""
    container.seek(int(wanted[0]), stream=stream)  # to the key frame at or before it
    return _keep(frames_among(container, stream, set(wanted.tolist())), wanted.tolist(), place)


def _decode_stored(
    path: str,
    version: Version | None,
    stored: StoredPackets,
    wanted: np.ndarray,
    place: Place,
    threads: int,
) -> np.ndarray | None:
    """The same by packets that are known, without opening the container.

    None if they do not all come, or if the file is not the one of which they are known.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        frames = stored_frames(file, stored, wanted, threads)
        pixels = _keep(frames, wanted.tolist(), place)
        return pixels if version_of(os.fstat(file)) == version else None
    except DAMAGE:
        return None
    finally:
        os.close(file)


def _keep(frames: Iterator[Any], wanted: list[int], place: Place) -> np.ndarray | None:
    kept, to_rgb = KeptFrames(len(wanted), place), ToRgb()
    last = None
    for frame in frames:
        if frame.pts is None or (last is not None and frame.pts <= last):
            return None
        last = frame.pts
        if frame.pts > wanted[kept.count]:
            return None
        if frame.pts == wanted[kept.count]:
            kept.add(to_rgb(frame))
            if kept.count == len(wanted):
                return kept.pixels
    return None


def _decode_referenced(
    container: Any, stream: Any, wanted: np.ndarray, first: int, place: Place
) -> np.ndarray | None:
    """The frames with the wanted timestamps, of all that somebody wants or another refers to.

    None if they do not all come, in order, or if a packet may not be a frame of its own.
    """
    packets, context = demux(container, stream), stream.codec_context
    frames = referenced_frames(packets, context, set(wanted.tolist()), first)
    try:
        pixels = _keep(frames, wanted.tolist(), place)
        if pixels is not None:
            for _ in frames:  # is the rest whole?
                pass
    except DAMAGE:
        return None
    return pixels


def _decode_all(
    container: Any, stream: Any, wanted: np.ndarray, place: Place
) -> tuple[np.ndarray, int]:
    """The wanted of all frames, and how many there were."""
    kept, to_rgb, number = KeptFrames(len(wanted), place), ToRgb(), 0
    for number, frame in enumerate(decoded_frames(container, stream), start=1):
        if kept.count < len(wanted) and number - 1 == wanted[kept.count]:
            kept.add(to_rgb(frame))
    return kept.pixels[: kept.count], number


def rgb_frames(container: Any, stream: Any) -> Iterator[np.ndarray]:
    """All frames one by one, uint8 RGB [H, W, 3]; within `opened`, which names the file."""
    to_rgb, frame = ToRgb(), None
    for frame in decoded_frames(container, stream):
        yield to_rgb(frame)
    if frame is None:
        raise ValueError("no frame decodes")


def check_size(height: int, width: int) -> None:
    """A ValueError if frames of this size are none, or would take too much memory."""
    if min(height, width) < 1:
        raise ValueError(f"frames of {width}x{height} pixels are empty")
    shape = f"frames of {width}x{height} pixels are too"
    if height * width > MAX_PIXELS:
        raise ValueError(f"{shape} large; {MAX_PIXELS} pixels are allowed")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"{shape} narrow; the longer side may be {MAX_ASPECT} times the shorter one"
        )


class ToRgb:
    """Upright RGB pixels of the decoded frames of a video; its first one says what is up.

    One object for many frames, as setting it up costs more than a frame.
    """

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()
        self._orientation: Orientation | None = None

    def __call__(self, frame: Any) -> np.ndarray:
        check_size(frame.height, frame.width)
        rgb = self._reformatter.reformat(frame, format="rgb24", **ONE_THREAD).to_ndarray()
        self._orientation = self._orientation or Orientation.of(frame)
        return self._orientation.upright(rgb)


class KeptFrames:
    """Regions of RGB frames, filled in order."""

    def __init__(self, capacity: int, place: Place) -> None:
        self.pixels = np.empty((0, 0, 0, 3), np.uint8)
        self.count = 0
        self._capacity = capacity
        self._place = place
        self._frame_size = (0, 0)

    def add(self, image: np.ndarray) -> None:
        # A video may change its size on the way: each frame has a region by its
        # own size, and all regions are scaled to that of the first.
        height, width = image.shape[:2]
        if (height, width) != self._frame_size:
            self._frame_size, self._region = (height, width), self._place(height, width)
        top, left, height, width, out_height, out_width = self._region
        if self.count == 0:
            self.pixels = np.empty((self._capacity, out_height, out_width, 3), np.uint8)
        region, out = image[top : top + height, left : left + width], self.pixels[self.count]
        if region.shape == out.shape:
            out[:] = region
        else:
            cv2.resize(region, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
        self.count += 1


def order_of(indices: np.ndarray) -> np.ndarray:
    """Which of the distinct indices, sorted, each one is."""
    return np.unique(indices, return_inverse=True)[1].reshape(indices.shape)
