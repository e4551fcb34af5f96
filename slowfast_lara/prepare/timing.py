"""Frame timestamps of a source video, and muxing of packets with these timestamps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

_DEFAULT_RATE = Fraction(30)  # for files that declare no plausible frame rate
# Maximum timescale (ticks per second) for a constant frame rate, well within the 32 bits of mp4's
# timescale field; also the maximum plausible frame rate.
_MAX_TICKS = 1_000_000


class Timing(NamedTuple):
    """Presentation times of all frames."""

    pts: Sequence[int]  # timestamps in units of `time_base`; the first is 0
    last_duration: int  # duration of the last frame, in units of `time_base`
    time_base: Fraction  # seconds per unit of `pts`
    rate: Fraction  # frames per second
    is_constant_rate: bool


def frame_rate(stream: Any) -> Fraction:
    """Frame rate that the container declares, or a default."""
    rate = Fraction(stream.average_rate or 0)
    return rate if 0 < rate <= _MAX_TICKS else _DEFAULT_RATE


def timing_of(pts: list[int | None], last_duration: int, stream: Any) -> Timing:
    """Timing of decoded frames with timestamps `pts`.

    The frame rate is constant if the timestamps match the declared rate up to rounding. It is also
    assumed to be constant if timestamps are missing or not increasing.
    """
    rate, time_base = frame_rate(stream), stream.time_base
    known = [time - pts[0] for time in pts if time is not None and pts[0] is not None]
    is_timed = len(known) == len(pts) and all(a < b for a, b in itertools.pairwise(known))
    if is_timed and not _matches_rate(known, rate, time_base):
        steps = [after - before for before, after in itertools.pairwise(known)]
        last_duration = last_duration or int(statistics.median(steps))
        return Timing(known, last_duration, time_base, rate, False)
    if rate.numerator > _MAX_TICKS:
        rate = rate.limit_denominator(1001)
    return Timing(range(len(pts)), 1, 1 / rate, rate, True)


def _matches_rate(pts: list[int], rate: Fraction, time_base: Fraction) -> bool:
    frames_per_tick = float(time_base * rate)
    # Tolerate one tick: the first and the current timestamp are both rounded.
    return all(
        abs(time * frames_per_tick - number) <= frames_per_tick * 1.001
        for number, time in enumerate(pts)
    )


def mux(out: Any, stream: Any, packets: list[Any], numbers: list[int], timing: Timing) -> None:
    """Mux packets, given in decoding order; `numbers` are their positions in presentation order."""
    pts = [*timing.pts, timing.pts[-1] + timing.last_duration]
    # Decoding times are the sorted pts, shifted so that no dts exceeds its packet's pts.
    delay = max(pts[position] - pts[number] for position, number in enumerate(numbers))
    stream.time_base = timing.time_base
    for position, (packet, number) in enumerate(zip(packets, numbers, strict=True)):
        packet.time_base, packet.stream = timing.time_base, stream
        packet.pts, packet.dts = pts[number], pts[position] - delay
        packet.duration = pts[number + 1] - pts[number]
        out.mux(packet)
