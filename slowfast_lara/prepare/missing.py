"""What a video file promises and does not hold: it was cut short, or cannot be read to its end."""

from __future__ import annotations

import itertools
from typing import Any

from slowfast_lara.data.video import demux, open_video
from slowfast_lara.errors import DecodeError

# Whose headers tell the time at which the last of their streams ends.
_WITH_DURATION = ("matroska", "flv", "asf")
# By so many seconds, and by so many of the longest step between two frames, it may be wrong.
_SLACK_SECONDS, _SLACK_STEPS = 0.5, 2
_MICROSECONDS = 1e6


def missing(path: str) -> str:
    """What is not there; "" if nothing. A DecodeError if the file cannot be read."""
    errors: list[Exception] = []
    with open_video(path, 1) as (container, stream):
        # An mp4 file's index has what its edit lists leave, of which its header counts all.
        promised = len(getattr(stream, "index_entries", ()))
        frames, last, slack = _frames(container, stream, errors)
        is_avi_without_index = container.format.name == "avi" and promised < frames
        promised = max(promised, stream.frames if is_avi_without_index else 0)
        seconds = _promised_seconds(container)
    parts = [f"{frames} of {promised} frames are there"] if frames < promised else []
    if last < seconds - slack and (last := _last_time(path)) < seconds - slack:
        parts.append(f"{last:.1f} of {seconds:.1f} seconds are there")
    parts += [f"it ends with: {getattr(e, 'strerror', None) or e}" for e in errors]
    if parts:
        _read_through(path)
    return ", ".join(parts)


def _frames(container: Any, stream: Any, errors: list[Exception]) -> tuple[int, float, float]:
    """How many frames there are, when the last one ends, and how far the header may be off."""
    count, last, times = 0, 0, set()
    for packet in demux(container, stream, errors):
        count += packet.size > 0
        if packet.size and packet.pts is not None:
            times.add(packet.pts)
            last = max(last, packet.pts + (packet.duration or 0))
    longest = max((b - a for a, b in itertools.pairwise(sorted(times))), default=0)
    tick = float(stream.time_base)
    return count, last * tick, max(_SLACK_SECONDS, _SLACK_STEPS * longest * tick)


def _promised_seconds(container: Any) -> float:
    has_duration = any(name in container.format.name for name in _WITH_DURATION)
    return (container.duration or 0) / _MICROSECONDS if has_duration else 0.0


def _last_time(path: str) -> float:
    """The end of all streams: sound may be longer than the pictures."""
    last = 0.0
    with open_video(path, 1) as (container, _):
        for packet in demux(container):
            if packet.pts is not None:
                last = max(last, float((packet.pts + (packet.duration or 0)) * packet.time_base))
    return last


def _read_through(path: str) -> None:
    """FFmpeg takes what a disk fails to read for the end of a file."""
    try:
        with open(path, "rb") as file:
            while file.read(1 << 20):
                pass
    except OSError as error:
        raise DecodeError(f"{path}: {error.strerror}") from None
