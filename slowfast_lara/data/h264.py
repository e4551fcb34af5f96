"""H.264 by the headers of its units (ITU-T H.264, 7.3), so that some frames need no decoding.

`FrameOrder` looks at the packets of a video one by one: is each a frame, are all of those that
others refer to there, and do they come in the order of their times? Where it cannot tell, it
says no.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# Kinds of units: slices, of which the second kind refers to nothing before; and those without
# pictures or settings: additional information, the start of a picture, filling.
SLICE, FRESH_SLICE, WITHOUT_EFFECT = 1, 5, (6, 9, 12)
_SEQUENCE, _PICTURE = 7, 8
# Whose settings say more of their colours.
_HIGH_PROFILES = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 144, 244)
# What is read of a unit is within its first bytes: the rest is not copied.
_HEADER_BYTES, _SETTINGS_BYTES = 24, 1024


def referenced_frames(
    packets: Iterable[Any], context: Any, wanted: set[int], first: int
) -> Iterator[Any]:
    """Decoded frames, all but those that are not `wanted` and to which no other refers.

    A ValueError where a packet is damaged or not a frame, or where one is missing; `first` is
    the time of the first frame.
    """
    # Some damage is an error only if asked for, some is told by the packet or the frame alone.
    context.options = {"err_detect": "explode"}
    order = FrameOrder(bytes(context.extradata or b""))
    expected: int | None = first
    missing = 0
    for packet in packets:
        # The decoder does not look at what it leaves out: whether that is a frame, say.
        is_needed = packet.size == 0 or order.add(memoryview(packet), packet.pts)
        is_left_out = not is_needed and packet.pts not in wanted
        context.skip_frame = "NONREF" if is_left_out else "DEFAULT"
        if packet.is_corrupt:
            raise ValueError("a packet is damaged")
        missing += packet.size > 0 and not is_left_out and not packet.is_discard
        for frame in packet.decode():
            if frame.is_corrupt or frame.interlaced_frame or expected not in (None, frame.pts):
                raise ValueError("not every packet is a frame")
            expected = None
            missing -= 1
            yield frame
    if missing or not order.is_that_of_times():
        raise ValueError("not every packet became a frame, in order")


class _Sequence(NamedTuple):
    """What the settings of a sequence say of the headers of slices."""

    number_bits: int
    order_bits: int  # 0 if pictures are shown as they come
    separate_colours: bool
    only_frames: bool


class _Slice(NamedTuple):
    """Of the frame that a slice belongs to: its number, and its place in the order of showing.

    Both are told in so many bits that they begin again at `numbers` and `places`.
    """

    number: int
    numbers: int
    place: int
    places: int


class FrameOrder:
    """Whether packets, in the order of decoding, are frames of which none is missing."""

    def __init__(self, extradata: bytes) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._sequence_of: dict[int, int] = {}  # by the settings of pictures
        self._next_number: int | None = None
        self._fresh = self._last_place = 0
        self._shown: list[tuple[int, int, int]] = []  # start, place since then, time
        is_mp4 = extradata[:1] == b"\1"
        self._length_bytes = (int.from_bytes(extradata[4:5]) & 3) + 1 if is_mp4 else 0
        for unit in _settings(extradata) if is_mp4 else units(extradata, 0):
            self._take_settings(unit)

    def add(self, content: bytes | memoryview, time: int) -> bool:
        """Whether others may refer to the frame of the next packet, which is shown at this time.

        A ValueError if the packet may not be one frame, or one is missing before it.
        """
        first = b""
        for unit in units(content, self._length_bytes):
            if unit[0] & 31 not in (SLICE, FRESH_SLICE):
                self._take_settings(unit)
            # Only the first slice of a picture has the number 0, which is the bit 1.
            elif first and (unit[0] != first[0] or unit[1:2] >= b"\x80"):
                raise ValueError("a packet of several pictures")
            else:
                first = first or unit
        if first[1:2] < b"\x80":
            raise ValueError("a packet without the first slice of a picture")
        is_fresh, is_reference = first[0] & 31 == FRESH_SLICE, first[0] & 0x60 > 0
        header = self._header(first, is_fresh)
        # 7.4.3: one more than that of the last frame to which others may refer.
        if header.number != (0 if is_fresh else self._next_number):
            raise ValueError("a frame is missing")
        if is_fresh:
            self._fresh, self._last_place = self._fresh + 1, 0
        # 8.2.1.1: of all places that end in these bits, the one that is nearest to the last.
        half = header.places // 2
        step = (header.place - self._last_place + half - 1) % header.places - half + 1
        place = self._last_place + step if header.places > 1 else len(self._shown)
        self._shown.append((self._fresh, place, time))
        if is_reference:
            self._next_number = (header.number + 1) % header.numbers
            self._last_place = place
        return is_reference

    def is_that_of_times(self) -> bool:
        """Whether the frames are shown in the order of their times."""
        times = [time for *_, time in sorted(self._shown)]
        return all(before < after for before, after in itertools.pairwise(times))

    def _header(self, unit: bytes, is_fresh: bool) -> _Slice:
        bits = _Bits(unit[1:_HEADER_BYTES])
        bits.number()  # of the slice
        if bits.number() > 9:
            raise ValueError("a slice of no known kind")
        sequence = self._sequences.get(self._sequence_of.get(bits.number(), -1))
        if sequence is None:
            raise ValueError("a slice without its settings")
        bits.take(2 if sequence.separate_colours else 0)
        number = bits.take(sequence.number_bits)
        if not sequence.only_frames and bits.take(1):
            raise ValueError("a field")
        if is_fresh:
            bits.number()  # of the start
        place = bits.take(sequence.order_bits)
        return _Slice(number, 1 << sequence.number_bits, place, 1 << sequence.order_bits)

    def _take_settings(self, unit: bytes) -> None:
        if unit[0] & 31 == _SEQUENCE:
            name, sequence = _read_sequence(_Bits(unit[1:]))
            self._sequences[name] = sequence
        elif unit[0] & 31 == _PICTURE:
            bits = _Bits(unit[1:])
            name = bits.number()
            self._sequence_of[name] = bits.number()


def _read_sequence(bits: _Bits) -> tuple[int, _Sequence]:
    profile = bits.take(24) >> 16
    name = bits.number()
    separate_colours = False
    if profile in _HIGH_PROFILES:
        separate_colours = bits.number() == 3 and bool(bits.take(1))
        bits.number(), bits.number()  # depths of the colours
        if bits.take(2) & 1:
            raise ValueError("matrices of their own, which are not read here")
    number_bits = bits.number() + 4
    if number_bits > 16:
        raise ValueError("frames of longer numbers than there are")
    kind_of_order = bits.number()
    if kind_of_order not in (0, 2):
        raise ValueError("an order of pictures that is not read here")
    order_bits = bits.number() + 4 if kind_of_order == 0 else 0
    if order_bits > 16:
        raise ValueError("more places than there are")
    bits.number()  # of references
    bits.take(1)
    bits.number(), bits.number()  # width and height
    return name, _Sequence(number_bits, order_bits, separate_colours, bool(bits.take(1)))


def _settings(extradata: bytes) -> Iterator[bytes]:
    """The units in the extradata of an mp4 file: settings of sequences, then of pictures."""
    place = 5
    for mask in (31, 255):
        count = int.from_bytes(extradata[place : place + 1]) & mask
        place += 1
        for _ in range(count):
            start = place + 2
            place = start + int.from_bytes(extradata[place:start])
            if not start < place <= len(extradata):
                raise ValueError("settings of other lengths than they say")
            yield extradata[start:place]


def units(content: bytes | memoryview, length_bytes: int) -> Iterator[bytes]:
    """The beginnings of a packet's units: each after its length, or if 0 after a start code.

    A ValueError if the lengths are not those of the packet.
    """
    if not length_bytes:
        yield from (unit[:_SETTINGS_BYTES] for unit in bytes(content).split(b"\0\0\1")[1:] if unit)
        return
    place = 0
    while place < len(content):
        start = place + length_bytes
        place = start + int.from_bytes(content[place:start])
        if not start < place <= len(content):
            raise ValueError("units of other lengths than the packet's")
        yield bytes(content[start : min(place, start + _SETTINGS_BYTES)])


class _Bits:
    """The bits of a unit, from the first on; a ValueError at the end."""

    def __init__(self, content: bytes) -> None:
        # 7.3.1: a 3 after two zeros stands there so that no start code does.
        content = content.replace(b"\0\0\3", b"\0\0")
        self._rest, self._left = int.from_bytes(content), 8 * len(content)

    def take(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise ValueError("a unit is cut short")
        value = self._rest >> self._left
        self._rest -= value << self._left
        return value

    def number(self) -> int:
        """9.1: as many bits after the first 1 as there are zeros before it, less 1."""
        zeros = self._left - self._rest.bit_length()
        if zeros > 32:
            raise ValueError("a number of more than 32 bits")
        return self.take(2 * zeros + 1) - 1
