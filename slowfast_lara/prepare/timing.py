"""When the frames of a video are shown, and packets with these times in a mp4."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

# Where a file does not tell its rate: the default of decode.py.
_DEFAULT_RATE = Fraction(30)
# A mp4 counts time in a whole number of ticks a second, which must not be too large.
_MAX_TICKS = 1_000_000


class Timing(NamedTuple):
    """When each frame is shown, from 0 on, and for how long the last one, in ticks."""

    ticks: Sequence[int]
    last: int
    tick: Fraction  # seconds
    rate: Fraction
    is_steady: bool


def frame_rate(stream: Any) -> Fraction:
    """Frames per second as the file has it."""
    rate = Fraction(stream.average_rate or 0)
    return rate if 0 < rate <= _MAX_TICKS else _DEFAULT_RATE


def timing_of(pts: list[int | None], last: int, stream: Any) -> Timing:
    """The timing of frames by their timestamps; `last` is the last one's duration.

    Where the timestamps are, but for the rounding of their clock, those of the stream's
    frame rate, the rate is taken; and where they do not tell the frames apart.
    """
    rate, tick = frame_rate(stream), stream.time_base
    known = [time - pts[0] for time in pts if time is not None and pts[0] is not None]
    is_timed = len(known) == len(pts) and all(a < b for a, b in itertools.pairwise(known))
    if is_timed and not _follows(known, rate, tick):
        steps = [after - before for before, after in itertools.pairwise(known)]
        return Timing(known, last or int(statistics.median(steps)), tick, rate, False)
    if rate.numerator > _MAX_TICKS:
        rate = rate.limit_denominator(1001)
    return Timing(range(len(pts)), 1, 1 / rate, rate, True)


def _follows(ticks: list[int], rate: Fraction, tick: Fraction) -> bool:
    # The first and the other time are rounded by half a tick each.
    frames_per_tick = float(tick * rate)
    return all(
        abs(time * frames_per_tick - number) <= frames_per_tick * 1.001
        for number, time in enumerate(ticks)
    )


def mux(out: Any, stream: Any, packets: list[Any], numbers: list[int], timing: Timing) -> None:
    """Packets in the order of decoding, with the number of the frame that each one holds."""
    ticks = [*timing.ticks, timing.ticks[-1] + timing.last]
    # A frame is decoded when its number of frames have been shown, less so much that
    # none is decoded after it is shown.
    delay = max(ticks[place] - ticks[number] for place, number in enumerate(numbers))
    stream.time_base = timing.tick
    for place, (packet, number) in enumerate(zip(packets, numbers, strict=True)):
        packet.time_base, packet.stream = timing.tick, stream
        packet.pts, packet.dts = ticks[number], ticks[place] - delay
        packet.duration = ticks[number + 1] - ticks[number]
        out.mux(packet)
