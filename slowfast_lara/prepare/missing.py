"""Detection of truncated videos: the container declares more frames or seconds than are present."""

from __future__ import annotations

import itertools
from typing import Any

from slowfast_lara.data.video import demux, open_video
from slowfast_lara.errors import DecodeError

# Containers whose header declares the duration of the longest stream.
_WITH_DURATION = ("matroska", "flv", "asf")
# Tolerated error of the declared duration: 0.5 s, or twice the longest frame interval if longer.
_SLACK_SECONDS, _SLACK_INTERVALS = 0.5, 2
_MICROSECONDS = 1e6


def describe_missing(path: str) -> str:
    """Describe what is missing from a video ("" if nothing); raise DecodeError if unreadable."""
    errors: list[Exception] = []
    with open_video(path) as (container, stream):
        # Not stream.frames: in mp4, it also counts frames that an edit list hides.
        declared = len(getattr(stream, "index_entries", ()))
        frames, end, slack = _scan(container, stream, errors)
        if container.format.name == "avi" and declared < frames:  # the AVI index is incomplete
            declared = max(declared, stream.frames)
        has_duration = any(name in container.format.name for name in _WITH_DURATION)
        seconds = (container.duration or 0) / _MICROSECONDS if has_duration else 0.0
    parts = [f"{frames} of {declared} frames present"] if frames < declared else []
    if end < seconds - slack:
        parts.append(f"{end:.1f} of {seconds:.1f} seconds present")
    parts += [f"reading failed: {getattr(e, 'strerror', None) or e}" for e in errors]
    if parts:
        _check_readable(path)
    return ", ".join(parts)


def _scan(container: Any, stream: Any, errors: list[Exception]) -> tuple[int, float, float]:
    """Demux all streams, because audio may be longer than video.

    Returns:
        The number of video frames; the end of the longest stream, in seconds; the tolerated error
        of the declared duration, in seconds.
    """
    count, end, times = 0, 0.0, set()
    for packet in demux(container, errors=errors):
        is_frame = packet.stream_index == stream.index and packet.size > 0
        count += is_frame
        if packet.pts is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if is_frame:
                times.add(packet.pts)
    longest = max((b - a for a, b in itertools.pairwise(sorted(times))), default=0)
    return count, end, max(_SLACK_SECONDS, _SLACK_INTERVALS * float(longest * stream.time_base))


def _check_readable(path: str) -> None:
    """Read the file; raise DecodeError on a disk error, which FFmpeg treats as end of file."""
    try:
        with open(path, "rb") as file:
            while file.read(1 << 20):
                pass
    except OSError as error:
        raise DecodeError(f"{path}: {error.strerror}") from None
