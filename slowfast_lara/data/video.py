"""Frames of video files, decoded with PyAV, cropped and resized as they arrive.

The caller passes a function that chooses frame indices by the number of frames and the frame rate.
The number of frames is counted from the packets, because headers are often wrong. The frame rate
is that of the header if it is plausible, otherwise it is computed from the timestamps.
- `read_clip` (training, validation) seeks to the last key frame at or before the first wanted frame
  and stops after the last wanted frame. It identifies frames by their timestamps. If these are
  unusable or a wanted frame is missing, it calls `read_whole`.
- `read_whole` (testing) decodes the whole video and counts frames. If that count differs from the
  number of packets, it calls the function again, with the number of decoded frames.
Unwanted frames are dropped immediately: memory does not grow with the length of the video.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import av
import cv2
import numpy as np
from av.stream import Disposition

from slowfast_lara.data.display import RgbConverter, check_size, display_size
from slowfast_lara.data.regions import CropFn, FrameBuffer
from slowfast_lara.data.timestamps import TimestampCache, Timestamps, file_version
from slowfast_lara.errors import DecodeError

# Exceptions that PyAV and OpenCV raise on damaged files.
DAMAGE = (av.FFmpegError, OSError, ValueError, OverflowError, MemoryError, cv2.error)
# Allowed container formats. Without this list, FFmpeg would also render text files as ANSI art, and
# follow playlists to other files and hosts.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,asf,mpegts,mpeg,mpegvideo,m4v,h264,hevc,"
    "ogg,gif,ivf,nut,mxf,dv,rm,swf,mjpeg,yuv4mpegpipe,vvc,av1,obu,wtv"
)
# If the frame rate in the header is outside this range, the timestamps give the rate.
PLAUSIBLE_FPS = (1, 240)
MAX_FPS = 120  # `check_length` allows this many frames per second; few cameras record more
# Codecs whose decoder can skip non-reference frames. (HEVC is not listed: its frames of a higher
# temporal sub-layer may refer to non-reference frames.)
_SKIPS_NONREF = ("h264", "mpeg1video", "mpeg2video", "mpeg4")
# Containers that store no presentation timestamps: FFmpeg synthesises them in decode order, which
# is wrong for codecs with B-frames.
_WITHOUT_PTS = ("avi", "asf", "mxf")
_WITH_B_FRAMES = ("h264", "hevc", "vvc", "vc1", "wmv3", "mpeg1video", "mpeg2video")

# (number of frames, frames per second) -> indices of the wanted frames, any shape.
FrameIndexFn = Callable[[int, float], np.ndarray]


class ClipFrames(NamedTuple):
    """The wanted frames of a video; a frame that is wanted several times is stored once."""

    pixels: np.ndarray  # uint8 RGB [distinct frames, H, W, 3]
    order: np.ndarray  # index in `pixels` of each wanted frame; an array of any shape


def read_clip(
    path: str,
    choose: FrameIndexFn,
    crop: CropFn,
    *,
    default_fps: float = 30,
    threads: int = 1,
    cache: TimestampCache | None = None,
) -> ClipFrames:
    """Read the chosen frames; decode from the last key frame at or before the first of them.

    Args:
        default_fps: frame rate if neither header nor timestamps give one.
        threads: number of decoder threads; with 0, FFmpeg chooses by the number of cores.
        cache: timestamps of known videos; an unknown video is demuxed first and added.
    """
    version = None if cache is None else file_version(path)
    cached = None if cache is None else cache.get(path, version)
    timestamps = cached or read_timestamps(path)
    if cache is not None and cached is None:
        cache.put(path, version, timestamps)
    if timestamps.pts is not None:
        indices = choose(timestamps.num_frames, timestamps.fps or default_fps)
        wanted = np.unique(indices)
        pixels = _decode_by_pts(path, timestamps, wanted, crop, threads)
        # Read again, without the cache, if the file was replaced while it was read.
        if cache is not None and file_version(path) != version:
            return read_clip(path, choose, crop, default_fps=default_fps, threads=threads)
        if pixels is not None:
            return ClipFrames(pixels, np.searchsorted(wanted, indices))
    return read_whole(path, choose, crop, default_fps=default_fps, threads=threads)


def read_whole(
    path: str, choose: FrameIndexFn, crop: CropFn, *, default_fps: float = 30, threads: int = 1
) -> ClipFrames:
    """Read the chosen frames, decoding all frames. Arguments as in `read_clip`."""
    timestamps = read_timestamps(path)
    expected, fps = timestamps.num_frames, timestamps.fps or default_fps
    indices = choose(expected, fps)
    for _ in range(2):
        wanted = np.unique(indices)
        pixels, count = _decode_by_number(path, wanted, crop, threads)
        if count == 0:
            raise DecodeError(f"{path}: no frame decodes")
        if count != expected:
            expected, indices = count, choose(count, fps)
        # If all newly chosen frames have been decoded already, a second pass is not needed.
        if np.isin(indices, wanted).all():
            return ClipFrames(pixels, np.searchsorted(wanted, indices))
    raise DecodeError(f"{path}: the number of frames differs between two decodes")


def read_timestamps(path: str) -> Timestamps:
    """Demux a video for its timestamps, without decoding."""
    pts: list[int | None] = []
    dts: list[int | None] = []
    key_pts: list[int] = []
    first = None
    with open_video(path) as (container, stream):
        codec = stream.codec_context.name
        for packet in demux(container, stream):
            first = first or packet
            if packet.is_keyframe and packet.pts is not None:
                key_pts.append(packet.pts)
            if _is_shown(packet, codec):
                pts.append(packet.pts)
                dts.append(packet.dts)
        is_synthesised = has_synthesised_pts(container, stream)
        header_fps, tick = header_rate(stream), float(stream.time_base or 0)
    if first is None or not pts:
        raise DecodeError(f"{path}: no frame decodes")
    known = np.unique(np.array([time for time in pts if time is not None], np.int64))
    is_complete = len(known) == len(pts)
    fps = header_fps or _mean_rate(known.tolist() if is_complete else dts, tick)
    # If packets come before the first key frame, some may not decode and would shift the indices.
    starts_with_key = first.is_keyframe and first.pts is not None and first.pts <= known[0]
    is_usable = is_complete and not is_synthesised and starts_with_key
    keys = np.unique(np.array(key_pts, np.int64))
    return Timestamps(len(pts), fps, known if is_usable else None, keys)


def _is_shown(packet: Any, codec: str) -> bool:
    """Whether a packet is displayed; False if empty, cut by an edit list, or a hidden VP8 frame."""
    if not packet.size or packet.is_discard:
        return False
    # Bit 4 of a VP8 frame's first byte is show_frame. Alternate reference frames are not shown.
    return codec != "vp8" or bool(memoryview(packet)[0] & 0x10)


def has_synthesised_pts(container: Any, stream: Any) -> bool:
    """Whether FFmpeg synthesises timestamps in decode order, which may not be display order."""
    return container.format.name in _WITHOUT_PTS and stream.codec_context.name in _WITH_B_FRAMES


def header_rate(stream: Any) -> float | None:
    """Frame rate in the header; None if it is missing or implausible."""
    rate = float(stream.average_rate or 0)
    return rate if PLAUSIBLE_FPS[0] <= rate <= PLAUSIBLE_FPS[1] else None


def _mean_rate(times: Sequence[int | None], tick: float) -> float | None:
    """Mean frames per second; `times` are in ticks of `tick` seconds, or None if unknown."""
    known = [(number, time) for number, time in enumerate(times) if time is not None]
    if not known:
        return None
    (first, start), (last, end) = known[0], known[-1]
    return (last - first) / ((end - start) * tick) if end > start and tick else None


def _decode_by_pts(
    path: str, timestamps: Timestamps, wanted: np.ndarray, crop: CropFn, threads: int
) -> np.ndarray | None:
    """Decode and crop frames; None if one is missing or out of order.

    `wanted` are distinct, sorted frame indices. Decodes from the last key frame at or before the
    first wanted frame; if that fails, from the start of the video.
    """
    assert timestamps.pts is not None
    pts, keys = timestamps.pts[wanted].tolist(), timestamps.key_pts
    # Exclude keys[0], the start of the video: it needs no seek.
    before = keys[1 : np.searchsorted(keys, pts[0], side="right")]
    for key in (*before[-1:].tolist(), None):
        with open_video(path, threads) as (container, stream):
            frames = frames_from(container, stream, pts, key)
            pixels = _keep(frames, RgbConverter(stream), pts, crop)
        if pixels is not None:
            return pixels
    return None


def frames_from(container: Any, stream: Any, wanted: list[int], key: int | None) -> Iterator[Any]:
    """Yield decoded frames until all `wanted` timestamps are decoded, or until an error.

    Starts with a seek to the timestamp `key`, or at the start of the video if `key` is None. After
    a seek, yields nothing if `_packets_from` finds no packet with a key frame flag, or if the first
    decoded frame is not a key frame: FFmpeg also flags some packets of other frames.
    """
    context, missing = stream.codec_context, set(wanted)
    can_skip = context.name in _SKIPS_NONREF
    must_be_key = key is not None
    start = None
    for packet in _packets_from(container, stream, key, wanted[0]):
        start = packet.pts if start is None else start
        if can_skip:
            context.skip_frame = "DEFAULT" if packet.pts in missing else "NONREF"
        missing.discard(packet.pts)
        try:
            frames = packet.decode()
            # Flush the decoder after the last wanted packet.
            frames += [] if missing or not packet.size else stream.decode(None)
        except DAMAGE:
            return
        for frame in frames:
            if frame.pts is None:
                return
            if must_be_key and frame.pts < start:  # skip leading frames: they need earlier frames
                continue
            if frame.is_corrupt or (must_be_key and not frame.key_frame):
                return
            must_be_key = False
            yield frame
        if not missing:
            return


def _packets_from(container: Any, stream: Any, key: int | None, first: int) -> Iterator[Any]:
    """Yield all packets or, if `key` is not None, the packets after a seek to timestamp `key`.

    After a seek, the first packet is flagged as key frame and has a timestamp of at most `first`.
    If the seek finds no such packet, nothing is yielded.
    """
    if key is None:
        yield from demux(container, stream)
        return
    try:
        container.seek(key, stream=stream)
    except DAMAGE:  # some containers cannot seek
        return
    packets = demux(container, stream)
    for packet in packets:
        if packet.pts is None:
            return
        if packet.is_keyframe and packet.pts <= first:
            yield packet
            yield from packets
        if packet.pts >= first:
            return


def _keep(
    frames: Iterator[Any], to_rgb: RgbConverter, wanted: list[int], crop: CropFn
) -> np.ndarray | None:
    """Crop the frames with the `wanted` timestamps; None if one is missing or out of order."""
    kept = FrameBuffer(len(wanted), crop)
    last = None
    for frame in frames:
        if (last is not None and frame.pts <= last) or frame.pts > wanted[kept.count]:
            return None
        last = frame.pts
        if last == wanted[kept.count]:
            kept.add(to_rgb(frame))
            if kept.count == len(wanted):
                return kept.pixels
    return None


def _decode_by_number(
    path: str, wanted: np.ndarray, crop: CropFn, threads: int
) -> tuple[np.ndarray, int]:
    """Decode all frames; return crops at the sorted indices `wanted`, and the frame count."""
    kept, count = FrameBuffer(len(wanted), crop), 0
    with open_video(path, threads) as (container, stream):
        to_rgb = RgbConverter(stream)
        for frame in decoded_frames(container, stream):
            if kept.count < len(wanted) and count == wanted[kept.count]:
                kept.add(to_rgb(frame))
            count += 1
    return kept.pixels[: kept.count], count


def count_frames(path: str) -> tuple[int, int]:
    """Decode a video; return the numbers of decoded frames and of undecodable packets."""
    errors: list[str] = []
    count = 0
    with open_video(path) as (container, stream):
        for frame in decoded_frames(container, stream, errors):
            # Raise ValueError if the frame size is not allowed.
            display_size(frame.width, frame.height, stream.sample_aspect_ratio)
            count += 1
    if not count:
        raise DecodeError(f"{path}: no frame decodes")
    return count, len(errors)


def check_length(path: str, max_seconds: float) -> None:
    """Raise a DecodeError if a video is too long by its timestamps or its number of frames.

    The limits are `max_seconds` and `max_seconds` * MAX_FPS frames. Demuxes packets up to the
    limit, without decoding.
    """
    max_frames = max_seconds * MAX_FPS
    with open_video(path) as (container, stream):
        first = None
        for count, packet in enumerate(demux(container, stream), start=1):
            seconds = 0.0
            if packet.pts is not None:
                first = packet.pts if first is None else first
                seconds = float((packet.pts - first) * stream.time_base)
            if seconds > max_seconds or count > max_frames:
                raise DecodeError(
                    f"{path}: longer than {max_seconds:g} seconds or {max_frames:g} frames"
                )


@contextmanager
def open_video(path: str, threads: int = 1) -> Iterator[tuple[Any, Any]]:
    """Open a container and its video stream; exceptions in DAMAGE become DecodeErrors."""
    container = None
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would block
            raise DecodeError(f"{path}: not a regular file")
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
    # Without "file:", FFmpeg would parse "a:b.mp4" as a URL with protocol "a".
    return av.open(
        f"file:{os.path.abspath(path)}",
        options={"protocol_whitelist": "file", "format_whitelist": CONTAINERS},
        metadata_errors="replace",
    )


def _video_stream(container: Any, path: str, threads: int) -> Any:
    for stream in container.streams.video:
        is_cover_picture = stream.disposition & Disposition.attached_pic
        if is_cover_picture or stream.codec_context is None:
            continue
        # Check the header before the decoder allocates memory; decoded frames are checked later.
        if stream.codec_context.width and stream.codec_context.height:
            check_size(stream.codec_context.height, stream.codec_context.width)
        stream.codec_context.thread_count = threads
        if threads != 1:
            stream.codec_context.thread_type = "AUTO"
        return stream
    raise DecodeError(f"{path}: no video stream that can be decoded")


def demux(
    container: Any, stream: Any = None, errors: list[Exception] | None = None
) -> Iterator[Any]:
    """Yield the packets of a stream (default: of all streams) until the end or until an error.

    The error is appended to `errors`.
    """
    try:
        yield from container.demux(stream)
    except DAMAGE as error:
        if errors is not None:
            errors.append(error)


def decoded_frames(container: Any, stream: Any, errors: list[str] | None = None) -> Iterator[Any]:
    """Yield frames in presentation order; append errors of undecodable packets to `errors`."""
    for packet in demux(container, stream):
        try:
            frames = packet.decode()
        except DAMAGE as error:
            if errors is not None:
                errors.append(str(error))
            continue
        yield from frames
