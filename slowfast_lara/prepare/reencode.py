"""One video made quick to read: small, upright, key frames close, H.264 in mp4, no sound.

The frames are those that decode.py sees, in its order: what does not decode there is
not in the result, and neither is what an edit list hides. Of each frame:
- It is shrunk to the wanted short side, never enlarged; both sides become even, as
  4:2:0 colour needs.
- It is turned and mirrored as the display matrix says, by the nearest quarter turn.
- Pixels that are not square become so, by shrinking their longer side.
- The fields of interlaced frames stay woven, as decode.py reads them.
Matrix, range and primaries of the colours are kept, so that the same RGB comes out.

A steady frame rate stays exactly what it was; otherwise each frame keeps its time.
The result is muxed in memory, written aside, decoded again, and renamed only if it has
the same number of frames at the same times.
"""

from __future__ import annotations

import io
import itertools
import os
import time
from typing import Any, NamedTuple

import av
from av.video.reformatter import Interpolation, VideoReformatter

from slowfast_lara.data.orientation import Orientation
from slowfast_lara.data.video import MAX_PIXELS, ONE_THREAD, decoded_frames, open_video
from slowfast_lara.errors import DecodeError
from slowfast_lara.files import atomic_write
from slowfast_lara.prepare.geometry import make_upright, target_size
from slowfast_lara.prepare.missing import missing
from slowfast_lara.prepare.timing import Timing, frame_rate, mux, timing_of

_UNSPECIFIED_COLORSPACE = 2
# Without CABAC, deblocking and small partitions, and with seven of eight frames that no
# other refers to, which a reader passes over: a third of the reading time of x264's own
# settings, at a sixth more bytes and 2 dB less. At CRF 22 real videos of 256 pixels become 7 %
# larger (38.9 dB), at 20 they would by 36 % (40.1 dB), and take a tenth longer to read. No bits
# for what only looks sharp, and no subtitles.
_QUICK_TO_READ = {
    "tune": "fastdecode",
    "bf": "7",
    "x264-params": "b-pyramid=none:b-adapt=0:ref=1:partitions=i8x8,i4x4:psy=0",
    "a53cc": "0",
}


class Options(NamedTuple):
    """What the results depend on."""

    short_side: int = 256
    key_frames: int = 16  # the largest distance of two key frames, in frames
    crf: int = 22
    preset: str = "fast"
    link: bool = False  # to an mp4 that has all this already


class Outcome(NamedTuple):
    """What became of a video."""

    how: str  # "encoded", "remuxed" or "linked"
    frames: int
    size: int  # bytes of the result
    seconds: float
    damage: str  # what did not decode or is not there; "" if nothing

    @property
    def disk_space(self) -> int:
        return 0 if self.how == "linked" else self.size


class Content(NamedTuple):
    """A result that is not written yet; no bytes: a link to the source."""

    mp4: bytes | None
    timing: Timing
    damage: str


def prepare_video(source: str, result: str, options: Options) -> Outcome:
    """Write `result` from `source`; a DecodeError where that cannot be."""
    start = time.perf_counter()
    for how in _ways(source, options):
        try:
            content = _MAKERS[how](source, options)
            size = _write(content, source, result)
        except DecodeError:
            if how == "encoded":
                raise
        else:
            frames, seconds = len(content.timing.ticks), time.perf_counter() - start
            return Outcome(how, frames, size, seconds, content.damage)
    raise AssertionError("the last way returns or raises")


def _write(content: Content, source: str, result: str) -> int:
    """The result's size."""
    with atomic_write(result) as aside:
        if content.mp4 is None:
            os.symlink(os.path.realpath(source), aside)
        else:
            with open(aside, "wb") as file:
                file.write(content.mp4)
        _verify(aside, content.timing, source)
        return os.path.getsize(aside)


def _verify(result: str, timing: Timing, source: str) -> None:
    """That the result decodes without errors, to the frames and times of the source."""
    errors: list[str] = []
    with open_video(result, 1) as (container, stream):
        pts = [frame.pts for frame in decoded_frames(container, stream, errors)]
        tick, rate = stream.time_base, stream.average_rate
    if errors or len(pts) != len(timing.ticks):
        raise DecodeError(
            f"{source}: {len(pts)} of {len(timing.ticks)} frames decode from the result"
        )
    # The container rounds times to its ticks.
    if None in pts or any(
        abs((time - pts[0]) * tick - wanted * timing.tick) > tick
        for time, wanted in zip(pts, timing.ticks, strict=True)
    ):
        raise DecodeError(f"{source}: the frames of the result have other times")
    if timing.is_steady and abs(rate / timing.rate - 1) > 1e-6:
        raise DecodeError(
            f"{source}: the result has {float(rate):.3f} frames per second, "
            f"not {float(timing.rate):.3f}"
        )


# What need not be encoded again


def _ways(source: str, options: Options) -> tuple[str, ...]:
    """How to make the result: the first that succeeds."""
    try:
        with open_video(source, 1) as (container, stream):
            is_mp4 = "mp4" in container.format.name
            fits = _has_wanted_frames(container, stream, options)
        with open_video(source, 1) as (container, stream):
            fits = fits and _has_wanted_packets(container, stream, options)
    except DecodeError:  # damaged: what decodes will be encoded
        fits = False
    if not fits:
        return ("encoded",)
    return ("linked" if options.link and is_mp4 else "remuxed", "encoded")


def _has_wanted_frames(container: Any, stream: Any, options: Options) -> bool:
    context = stream.codec_context
    return (
        context.name == "h264"
        and context.pix_fmt in ("yuv420p", "yuvj420p")
        and 0 < min(context.width, context.height) <= options.short_side
        and (stream.sample_aspect_ratio or 1) == 1
        and (first := next(decoded_frames(container, stream), None)) is not None
        and Orientation.of(first) == Orientation()
    )


def _has_wanted_packets(container: Any, stream: Any, options: Options) -> bool:
    """Key frames are close enough, and there is a time for every packet."""
    packets = _packets(container, stream)
    keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    distances = [later - key for key, later in itertools.pairwise([*keys, len(packets)])]
    return (
        keys[:1] == [0]
        and max(distances) <= options.key_frames
        and not any(packet.is_discard or packet.pts is None for packet in packets)
    )


def _packets(container: Any, stream: Any) -> list[Any]:
    return [packet for packet in container.demux(stream) if packet.size]


def _linked(source: str, options: Options) -> Content:
    log = _FrameLog()
    with open_video(source, 1) as (container, stream):
        for frame in decoded_frames(container, stream, log.errors):
            log.add(frame)
        timing = log.timing(stream)
    if damage := log.damage() or missing(source):
        raise DecodeError(f"{source}: {damage}")
    return Content(None, timing, "")


def _remuxed(source: str, options: Options) -> Content:
    """The packets as they are, without the sound."""
    timing = _linked(source, options).timing
    buffer = io.BytesIO()
    with open_video(source, 1) as (container, stream):
        packets = _packets(container, stream)
        if len(packets) != len(timing.ticks):
            raise DecodeError(f"{source}: {len(packets)} packets, {len(timing.ticks)} frames")
        place = {pts: number for number, pts in enumerate(sorted(packet.pts for packet in packets))}
        numbers = [place[packet.pts] for packet in packets]
        with av.open(buffer, "w", format="mp4") as out:
            mux(out, out.add_stream_from_template(stream), packets, numbers, timing)
    return Content(buffer.getvalue(), timing, "")


# Encoding


def _encoded(source: str, options: Options) -> Content:
    log = _FrameLog()
    with open_video(source, 1) as (container, stream):
        encoder = None
        for frame in decoded_frames(container, stream, log.errors):
            log.add(frame)
            encoder = encoder or _Encoder(frame, stream, options)
            encoder.add(frame)
        if encoder is None:
            raise DecodeError(f"{source}: no frame decodes")
        timing = log.timing(stream)
        damage = ", ".join(filter(None, (log.damage(), missing(source))))
        return Content(encoder.finish(timing), timing, damage)


class _FrameLog:
    """What the frames of a source say of themselves."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._pts: list[int | None] = []
        self._last = 0
        self._corrupt = 0

    def add(self, frame: Any) -> None:
        self._pts.append(frame.pts)
        self._last = frame.duration
        self._corrupt += frame.is_corrupt

    def timing(self, stream: Any) -> Timing:
        return timing_of(self._pts, self._last, stream)

    def damage(self) -> str:
        """What did not decode, or not wholly; "" if nothing."""
        parts = [f"{len(self.errors)} packets do not decode"] if self.errors else []
        parts += [f"{self._corrupt} frames are damaged"] if self._corrupt else []
        return ", ".join(parts)


class _Encoder:
    """Frames to H.264; they are numbered until the time of each is known."""

    def __init__(self, first: Any, stream: Any, options: Options) -> None:
        self._orientation = Orientation.of(first)
        aspect = stream.sample_aspect_ratio
        self._size = target_size(first.width, first.height, aspect, options.short_side)
        self._reformatter = VideoReformatter()  # one for all: setting it up is costly
        self._buffer = io.BytesIO()
        self._out = av.open(self._buffer, "w", format="mp4")
        self._rate = frame_rate(stream)
        settings = {"crf": str(options.crf), "preset": options.preset, **_QUICK_TO_READ}
        self._stream = self._out.add_stream("libx264", rate=self._rate, options=settings)
        self._stream.width, self._stream.height = self._orientation.turned(self._size)
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.thread_count = 1  # processes are the parallelism
        context.gop_size = options.key_frames
        context.color_range = first.color_range
        context.color_primaries, context.color_trc = first.color_primaries, first.color_trc
        # RGB becomes what readers take for granted where nothing is said.
        is_rgb = first.format.is_rgb
        context.colorspace = _UNSPECIFIED_COLORSPACE if is_rgb else first.colorspace
        self._packets: list[Any] = []
        self._count = 0

    def add(self, frame: Any) -> None:
        if frame.width * frame.height > MAX_PIXELS:
            raise ValueError(f"frames of {frame.width}x{frame.height} pixels are too large")
        width, height = self._size
        small = self._reformatter.reformat(
            frame, width, height, "yuv420p", interpolation=Interpolation.BICUBIC, **ONE_THREAD
        )
        upright = make_upright(small, self._orientation)
        upright.pts, upright.time_base = self._count, 1 / self._rate
        upright.pict_type = 0  # or the source's key frames would be key frames here, too
        self._packets += self._stream.encode(upright)
        self._count += 1

    def finish(self, timing: Timing) -> bytes:
        self._packets += self._stream.encode(None)
        numbers = [packet.pts for packet in self._packets]
        mux(self._out, self._stream, self._packets, numbers, timing)
        self._out.close()
        return self._buffer.getvalue()


_MAKERS = {"linked": _linked, "remuxed": _remuxed, "encoded": _encoded}
