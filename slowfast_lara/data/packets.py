"""What a video file holds, by its packets alone: nothing is decoded but one frame.

`scan` counts the frames and lists their times. Of H.264 in mp4 files it can also say where
in the file each packet lies and which of them no other frame refers to: with that, a clip
is read without opening the container, and only what its frames are made of is decoded
(`needed_packets`). That is worth its time where it is kept: packet_index.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import av
import cv2
import numpy as np

from slowfast_lara.data.h264 import FRESH_SLICE, SLICE, WITHOUT_EFFECT, units
from slowfast_lara.data.orientation import Orientation

# What PyAV and OpenCV raise on damaged files.
DAMAGE = (av.FFmpegError, OSError, ValueError, OverflowError, MemoryError, cv2.error)
# Bits of `StoredPackets.kinds`.
STARTS_ANEW, UNREFERENCED = 1, 2


class StoredPackets(NamedTuple):
    """Packets of H.264 in the order of decoding, to be read from the file itself."""

    extradata: bytes
    pts: np.ndarray
    places: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray


class Packets(NamedTuple):
    """What a video holds, without decoding it."""

    num_frames: int
    # In order of presentation; None where the packets do not all say theirs.
    pts: np.ndarray | None
    # Frames per second; None where neither the header nor the times tell.
    fps: float | None
    stored: StoredPackets | None = None


def demux(
    container: Any, stream: Any = None, errors: list[Exception] | None = None
) -> Iterator[Any]:
    """Packets up to the end, or to where the file is damaged beyond going on: see `errors`.

    Without a stream, those of all streams.
    """
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except DAMAGE as error:
            if errors is not None:
                errors.append(error)
            return
        yield packet


def scan(container: Any, stream: Any, path: str | None = None) -> Packets:
    """Reads through the packets of a container that was just opened; it then is at its end.

    With the path of its file, it is also seen where the packets lie there.
    """
    pts: list[int | None] = []
    with contextlib.ExitStack() as stack:
        file = None if path is None else stack.enter_context(open(path, "rb", buffering=0))
        places = None if file is None else _Places(container, stream, file.fileno())
        for packet in demux(container, stream):
            if packet.size:
                if places is not None:
                    places.add(packet)
                if not packet.is_discard:
                    pts.append(packet.pts)
    known = sorted({time for time in pts if time is not None})
    seconds = float((known[-1] - known[0]) * stream.time_base) if known else 0.0
    by_time = (len(known) - 1) / seconds if seconds > 0 else None
    fps = float(stream.average_rate or 0) or by_time
    if not pts or len(known) < len(pts) or _has_made_up_times(container, stream):
        return Packets(len(pts), None, fps)
    stored = None if places is None else places.stored()
    return Packets(len(pts), np.array(known, np.int64), fps, stored)


def _has_made_up_times(container: Any, stream: Any) -> bool:
    """An avi file has no times; FFmpeg numbers what these codecs reorder as it comes."""
    context = stream.codec_context
    is_avi = container.format.name == "avi"
    return is_avi and context.name in ("h264", "hevc") and context.has_b_frames


class _Places:
    """Where the packets of a container lie in its file.

    That is not told (None) for all but plain H.264 in mp4; where an edit list hides frames, or
    a packet is not to be found as it is; and where the container tells of the picture what the
    packets do not: how it is turned, its colours.
    """

    def __init__(self, container: Any, stream: Any, file: int) -> None:
        self._context = stream.codec_context
        self._extradata = bytes(self._context.extradata or b"")
        is_mp4 = "mp4" in container.format.name and self._extradata[:1] == b"\1"
        self._is_plain = is_mp4 and self._context.name == "h264" and len(self._extradata) > 6
        self._file = file
        self._rows: list[tuple[int, int, int, int]] = []
        self._first: Any = None

    def add(self, packet: Any) -> None:
        if not self._is_plain:
            return
        content = bytes(packet)
        has_more = packet.is_discard or any(True for _ in packet.iter_sidedata())
        if has_more or packet.pts is None or not self._lies_there(packet.pos, content):
            self._is_plain = False
            return
        self._first = self._first or packet
        kind = _kind(content, (self._extradata[4] & 3) + 1)
        self._rows.append((packet.pts, packet.pos, packet.size, kind))

    def _lies_there(self, place: int, content: bytes) -> bool:
        return place >= 0 and os.pread(self._file, len(content), place) == content

    def stored(self) -> StoredPackets | None:
        if not self._is_plain or not self._rows or not self._rows[0][3] & STARTS_ANEW:
            return None
        if not _decodes_alike(self._context, self._extradata, self._first):
            return None
        pts, places, sizes, kinds = np.array(self._rows, np.int64).T
        return StoredPackets(self._extradata, pts, places, sizes, kinds.astype(np.uint8))


def _kind(content: bytes, length_bytes: int) -> int:
    """By the headers of its units, each of which stands after its length."""
    try:
        headers = [unit[0] for unit in units(content, length_bytes)]
    except ValueError:
        return 0
    slices = [header for header in headers if header & 31 in (SLICE, FRESH_SLICE)]
    others = any(header & 31 not in (SLICE, FRESH_SLICE, *WITHOUT_EFFECT) for header in headers)
    if not slices:
        return 0
    if all(header & 31 == FRESH_SLICE for header in slices):
        return STARTS_ANEW
    is_referenced = any(header & 0x60 for header in slices)
    return 0 if is_referenced or others else UNREFERENCED


def _decodes_alike(context: Any, extradata: bytes, packet: Any) -> bool:
    """Whether a decoder that knows nothing of the container gives the same frame."""
    frames = []
    for decoder in (context, _h264_decoder(extradata, 1)):
        try:
            decoded = [*decoder.decode(packet), *decoder.decode(None)]
        except DAMAGE:
            return False
        if len(decoded) != 1:
            return False
        frames += decoded
    of_container, of_packets = (
        (frame.format.name, frame.colorspace, frame.color_range, Orientation.of(frame))
        for frame in frames
    )
    return (
        of_container == of_packets
        and Orientation.of(frames[0]) == Orientation()
        and np.array_equal(frames[0].to_ndarray(), frames[1].to_ndarray())
    )


def _h264_decoder(extradata: bytes, threads: int) -> Any:
    decoder = av.CodecContext.create("h264", "r")
    decoder.extradata, decoder.thread_count = extradata, threads
    return decoder


def needed_packets(stored: StoredPackets, wanted: np.ndarray) -> np.ndarray:
    """The numbers of the packets from which the frames with the `wanted` times decode.

    From the last start before each of them on; without what no other frame refers to, and
    without what comes after the last wanted one before the next start.
    """
    is_wanted = np.isin(stored.pts, wanted)
    starts = np.flatnonzero(stored.kinds & STARTS_ANEW)
    groups = np.searchsorted(starts, np.flatnonzero(is_wanted), side="right") - 1
    needed = np.zeros(len(stored.pts), bool)
    for group in np.unique(groups):
        last = np.flatnonzero(is_wanted)[groups == group].max()
        needed[starts[group] : last + 1] = True
    needed &= is_wanted | (stored.kinds & UNREFERENCED == 0)
    return np.flatnonzero(needed)


def _read_packets(stored: StoredPackets, numbers: np.ndarray, file: int) -> Iterator[Any]:
    """These packets of an open file."""
    for number in numbers:
        packet = av.Packet(os.pread(file, int(stored.sizes[number]), int(stored.places[number])))
        packet.pts = int(stored.pts[number])
        yield packet


def stored_frames(
    file: int, stored: StoredPackets, wanted: np.ndarray, threads: int
) -> Iterator[Any]:
    """Decoded frames of an open file, those with the `wanted` times among them."""
    decoder = _h264_decoder(stored.extradata, threads)
    for packet in _read_packets(stored, needed_packets(stored, wanted), file):
        yield from decoder.decode(packet)
    yield from decoder.decode(None)
