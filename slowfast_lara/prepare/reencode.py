"""Transcoding of one video for fast reading: a small H.264 mp4 with closely spaced key frames.

The result has the frames that data/video.py decodes from the source, in the same order. It omits
undecodable frames, and frames that an edit list hides. Each frame
- is scaled down (never up) to the short side, with even width and height, as 4:2:0 chroma requires,
- is rotated and mirrored by the display matrix, to the nearest quarter turn,
- gets square pixels: with wide pixels the height is reduced, with tall pixels the width,
- is not deinterlaced.
Colour matrix, range and primaries are kept, so that decoding gives the same RGB.

A constant frame rate stays exact; otherwise each frame keeps its timestamp. Audio is dropped. The
result is muxed in memory, written to a temporary file and decoded again. The file is renamed to its
final name only if it has as many frames as the source, with the same timestamps.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from slowfast_lara.data.display import ONE_THREAD, Orientation, display_size, square_pixel_size
from slowfast_lara.data.video import decoded_frames, open_video
from slowfast_lara.errors import DecodeError
from slowfast_lara.files import atomic_write
from slowfast_lara.prepare.missing import describe_missing
from slowfast_lara.prepare.timing import Timing, frame_rate, mux, timing_of

_UNSPECIFIED_COLORSPACE = 2
# Colour matrices with the same code in H.264 and swscale. Frames with other codes are converted as
# ITU-R BT.601, which has several codes and which decoders assume if no matrix is declared.
_CONVERTIBLE = (Colorspace.ITU709, Colorspace.FCC, Colorspace.SMPTE240M, Colorspace.BT2020)
# No CABAC, no deblocking, few partition types; seven of eight frames are non-reference B-frames,
# which a reader can skip. Compared with x264's defaults, reading takes a third of the time, files
# have 17 % more bytes, and PSNR is 2 dB lower. Real videos with a short side of 256 pixels become
# 7 % larger than the source at CRF 22 (PSNR 38.9 dB). At CRF 20, they become 36 % larger (40.1 dB)
# and 10 % slower to read.
# psy=0 spends no bits on perceived sharpness; a53cc=0 drops closed captions.
_FAST_DECODE = {
    "tune": "fastdecode",
    "bf": "7",
    "x264-params": "b-pyramid=none:b-adapt=0:ref=1:partitions=i8x8,i4x4:psy=0",
    "a53cc": "0",
}


class Options(NamedTuple):
    """Encoding options; prepared.jsonl stores them to detect changes."""

    short_side: int = 256
    key_frames: int = 16  # maximum distance between key frames, in frames
    crf: int = 22
    preset: str = "fast"
    link: bool = False  # link to mp4 files that need no transcoding, instead of remuxing


class PreparedVideo(NamedTuple):
    """Summary of a prepared video; prepared.jsonl stores it."""

    method: str  # "encoded", "remuxed" or "linked"
    frames: int
    size: int  # file size in bytes
    seconds: float  # processing time
    damage: str  # description of undecodable or missing frames; "" if none

    @property
    def disk_space(self) -> int:
        return 0 if self.method == "linked" else self.size


class _Content(NamedTuple):
    mp4: bytes | None  # content of the mp4 file; None if the result is a link
    timing: Timing
    damage: str


def prepare_video(source: str, result: str, options: Options) -> PreparedVideo:
    """Transcode `source` to `result`; raise DecodeError if transcoding or verification fails."""
    start = time.perf_counter()

    def write(method: str, content: _Content) -> PreparedVideo:
        size = _write(content, source, result)
        frames, seconds = len(content.timing.pts), time.perf_counter() - start
        return PreparedVideo(method, frames, size, seconds, content.damage)

    if (method := _copy_method(source, options)) is not None:
        with contextlib.suppress(DecodeError):  # damaged source or failed copy: encode instead
            return write(method, _copy(source, method))
    return write("encoded", _encode(source, options))


def _write(content: _Content, source: str, result: str) -> int:
    """Write and verify the result; return its size in bytes."""
    with atomic_write(result) as temporary:
        if content.mp4 is None:
            os.symlink(os.path.realpath(source), temporary)
        else:
            with open(temporary, "wb") as file:
                file.write(content.mp4)
        _verify(temporary, content.timing, source)
        return os.path.getsize(temporary)


def _verify(result: str, timing: Timing, source: str) -> None:
    """Raise DecodeError unless the result has the frame count and the timing of the source."""
    errors: list[str] = []
    with open_video(result) as (container, stream):
        pts = [frame.pts for frame in decoded_frames(container, stream, errors)]
        time_base, rate = stream.time_base, stream.average_rate
    if errors or len(pts) != len(timing.pts):
        raise DecodeError(
            f"{source}: result has {len(pts)} of {len(timing.pts)} frames and "
            f"{len(errors)} undecodable packets"
        )
    # Tolerate one tick: the container rounds timestamps to its time base.
    if None in pts or any(
        abs((actual - pts[0]) * time_base - expected * timing.time_base) > time_base
        for actual, expected in zip(pts, timing.pts, strict=True)
    ):
        raise DecodeError(f"{source}: result has timestamps that differ from the source")
    if timing.is_constant_rate and abs(rate / timing.rate - 1) > 1e-6:
        raise DecodeError(
            f"{source}: result has {float(rate):.3f} frames per second, "
            f"expected {float(timing.rate):.3f}"
        )


# Preparation without encoding: link or remux


def _copy_method(source: str, options: Options) -> str | None:
    """Return "linked" or "remuxed" if the video needs no encoding, otherwise None."""
    try:
        with open_video(source) as (container, stream):
            if not _has_target_format(stream, options):
                return None
            packets = list(container.demux(stream))
            if not _has_close_key_frames(packets, options):
                return None
            first = next((frame for packet in packets for frame in packet.decode()), None)
            if first is None or Orientation.of(first) != Orientation():
                return None
            is_mp4 = "mp4" in container.format.name
    except DecodeError:  # a damaged source must be encoded
        return None
    return "linked" if options.link and is_mp4 else "remuxed"


def _has_target_format(stream: Any, options: Options) -> bool:
    context = stream.codec_context
    return (
        context.name == "h264"
        and context.pix_fmt in ("yuv420p", "yuvj420p")
        and 0 < min(context.width, context.height) <= options.short_side
        and (stream.sample_aspect_ratio or 1) == 1
    )


def _has_close_key_frames(packets: list[Any], options: Options) -> bool:
    """Whether key frames are close, every packet has a pts, and none has the discard flag."""
    packets = [packet for packet in packets if packet.size]
    keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    distances = [later - key for key, later in itertools.pairwise([*keys, len(packets)])]
    return (
        keys[:1] == [0]
        and max(distances) <= options.key_frames
        and not any(packet.is_discard or packet.pts is None for packet in packets)
    )


def _copy(source: str, method: str) -> _Content:
    """Remux the source unless it will be linked; raise DecodeError if damaged or not remuxable."""
    timing, damage = _decode(source)
    if damage:
        raise DecodeError(f"{source}: {damage}")
    if method == "linked":
        return _Content(None, timing, "")
    buffer = io.BytesIO()
    with open_video(source) as (container, stream):
        packets = [packet for packet in container.demux(stream) if packet.size]
        if len(packets) != len(timing.pts):
            count, frames = len(packets), len(timing.pts)
            raise DecodeError(f"{source}: cannot remux: {count} packets decode to {frames} frames")
        ranks = {pts: number for number, pts in enumerate(sorted(packet.pts for packet in packets))}
        numbers = [ranks[packet.pts] for packet in packets]
        with av.open(buffer, "w", format="mp4") as out:
            mux(out, out.add_stream_from_template(stream), packets, numbers, timing)
    return _Content(buffer.getvalue(), timing, "")


def _decode(source: str, use: Callable[[Any, Any], None] | None = None) -> tuple[Timing, str]:
    """Call `use(frame, stream)` on all frames; return the timing and a description of damage."""
    errors: list[str] = []
    pts: list[int | None] = []
    last_duration = corrupt = 0
    with open_video(source) as (container, stream):
        for frame in decoded_frames(container, stream, errors):
            pts.append(frame.pts)
            last_duration = frame.duration
            corrupt += frame.is_corrupt
            if use is not None:
                use(frame, stream)
        if not pts:
            raise DecodeError(f"{source}: no frame decodes")
        timing = timing_of(pts, last_duration, stream)
    damage = [f"{len(errors)} packets do not decode"] if errors else []
    damage += [f"{corrupt} frames are damaged"] if corrupt else []
    damage += filter(None, [describe_missing(source)])
    return timing, ", ".join(damage)


# Preparation with encoding


def _encode(source: str, options: Options) -> _Content:
    encoder = _Encoder(options)
    timing, damage = _decode(source, encoder.add)
    return _Content(encoder.finish(timing), timing, damage)


class _Encoder:
    """H.264 encoder and muxer; pts are frame numbers until `finish` sets the timestamps."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._reformatter = VideoReformatter()  # shared by all frames: its set-up is slow
        self._to_rgb, self._from_rgb = VideoReformatter(), VideoReformatter()
        self._buffer = io.BytesIO()
        self._out = av.open(self._buffer, "w", format="mp4")
        self._packets: list[Any] = []
        self._count = 0

    def _start(self, first: Any, stream: Any) -> None:
        """Set up the output stream for the size, orientation and colours of the first frame."""
        options, aspect = self._options, stream.sample_aspect_ratio
        self._orientation = Orientation.of(first)
        self._size = target_size(first.width, first.height, aspect, options.short_side)
        self._rate = frame_rate(stream)
        settings = {"crf": str(options.crf), "preset": options.preset, **_FAST_DECODE}
        self._stream = self._out.add_stream("libx264", rate=self._rate, options=settings)
        upright_size = self._size[::-1] if self._orientation.transpose else self._size
        self._stream.width, self._stream.height = upright_size
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.thread_count = 1  # other processes encode other videos in parallel
        context.gop_size = options.key_frames
        context.color_range = first.color_range
        context.color_primaries, context.color_trc = first.color_primaries, first.color_trc
        # Declare no colour matrix for RGB frames: swscale uses BT.601, the default of decoders.
        is_rgb = first.format.is_rgb
        context.colorspace = _UNSPECIFIED_COLORSPACE if is_rgb else first.colorspace
        self._colors = first.colorspace, first.color_range

    def add(self, frame: Any, stream: Any) -> None:
        # Raise ValueError if the frame size is not allowed.
        display_size(frame.width, frame.height, stream.sample_aspect_ratio)
        if self._count == 0:
            self._start(frame, stream)
        options = {"interpolation": Interpolation.BICUBIC, **ONE_THREAD}
        if (frame.colorspace, frame.color_range) == self._colors:
            small = self._reformatter.reformat(frame, *self._size, "yuv420p", **options)
        else:  # convert to the colour matrix and range of the first frame
            rgb = self._to_rgb.reformat(frame, *self._size, "rgb24", **options)
            matrix, color_range = self._colors
            small = self._from_rgb.reformat(
                rgb,
                format="yuv420p",
                dst_colorspace=matrix if matrix in _CONVERTIBLE else Colorspace.ITU601,
                dst_color_range=color_range or ColorRange.MPEG,
                **ONE_THREAD,
            )
        upright = make_upright(small, self._orientation)
        upright.pts, upright.time_base = self._count, 1 / self._rate
        upright.pict_type = 0  # the encoder, not the source, determines the picture type
        self._packets += self._stream.encode(upright)
        self._count += 1

    def finish(self, timing: Timing) -> bytes:
        self._packets += self._stream.encode(None)
        numbers = [packet.pts for packet in self._packets]
        mux(self._out, self._stream, self._packets, numbers, timing)
        self._out.close()
        return self._buffer.getvalue()


def make_upright(frame: Any, orientation: Orientation) -> Any:
    """Rotate and mirror a yuv420p frame of even width and height."""
    if orientation == Orientation():
        return frame
    width, height = frame.width, frame.height
    flat = frame.to_ndarray().reshape(-1)
    planes = np.split(flat, [width * height, width * height * 5 // 4])
    shapes = [(height, width), *[(height // 2, width // 2)] * 2]
    rotated = [orientation.upright(plane.reshape(shape)) for plane, shape in zip(planes, shapes)]
    packed = np.concatenate([plane.reshape(-1) for plane in rotated])
    packed = packed.reshape(-1, rotated[0].shape[1])
    upright = av.VideoFrame.from_ndarray(packed, format="yuv420p")
    upright.colorspace, upright.color_range = frame.colorspace, frame.color_range
    return upright


def target_size(
    width: int, height: int, sample_aspect: Fraction | None, short_side: int
) -> tuple[int, int]:
    """Even (width, height) of a frame scaled down to `short_side`, with square pixels.

    `sample_aspect` is the sample aspect ratio of the source. The frame is never scaled up.
    """
    square_width, square_height = square_pixel_size(width, height, sample_aspect)
    scale = min(short_side / min(square_width, square_height), Fraction(1))
    return _even(square_width * scale, width), _even(square_height * scale, height)


def _even(length: Fraction, maximum: int) -> int:
    """The even number nearest to `length`, at most `maximum` and at least 2."""
    nearest = 2 * round(length / 2)
    return max(2, nearest if nearest <= maximum else nearest - 2)
