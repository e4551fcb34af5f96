"""H.264 by the headers of its units (ITU-T H.264, 7.3), so that some frames need no decoding.

`FrameOrder` looks at the packets of a video one by one: is each a frame, and are all of those
that others refer to there? Where it cannot tell, it says no.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

# Kinds of units: slices, of which the second kind refers to nothing before; and those without
# pictures or settings: additional information, the start of a picture, filling.
SLICE, FRESH_SLICE, WITHOUT_EFFECT = 1, 5, (6, 9, 12)
_SEQUENCE, _PICTURE = 7, 8
# Whose settings say more of their colours.
_HIGH_PROFILES = (44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 144, 244)
# What is read of a unit is within its first bytes.
_HEADER_BYTES, _SETTINGS_BYTES = 16, 1024


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
        is_left_out = packet.size > 0 and not order.add(bytes(packet)) and packet.pts not in wanted
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
    if missing:
        raise ValueError("not every packet became a frame")


class _Sequence(NamedTuple):
    """What the settings of a sequence say of the headers of slices."""

    number_bits: int
    separate_colours: bool
    only_frames: bool


class FrameOrder:
    """Whether packets, in the order of decoding, are frames of which none is missing."""

    def __init__(self, extradata: bytes) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._sequence_of: dict[int, int] = {}  # by the settings of pictures
        self._next_number: int | None = None
        is_mp4 = extradata[:1] == b"\1"
        self._length_bytes = (int.from_bytes(extradata[4:5]) & 3) + 1 if is_mp4 else 0
        for unit in _settings(extradata) if is_mp4 else units(extradata, 0):
            self._take_settings(unit)

    def add(self, content: bytes) -> bool:
        """Whether others may refer to the frame of the next packet.

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
        number, numbers = self._frame_number(first)
        # 7.4.3: one more than that of the last frame to which others may refer.
        if number != (0 if is_fresh else self._next_number):
            raise ValueError("a frame is missing")
        if is_reference:
            self._next_number = (number + 1) % numbers
        return is_reference

    def _frame_number(self, unit: bytes) -> tuple[int, int]:
        """Of the frame that a slice belongs to, and how many numbers there are."""
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
        return number, 1 << sequence.number_bits

    def _take_settings(self, unit: bytes) -> None:
        if unit[0] & 31 == _SEQUENCE:
            name, sequence = _read_sequence(_Bits(unit[1:_SETTINGS_BYTES]))
            self._sequences[name] = sequence
        elif unit[0] & 31 == _PICTURE:
            bits = _Bits(unit[1:_SETTINGS_BYTES])
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
    if kind_of_order == 0:
        bits.number()
    elif kind_of_order == 1:
        bits.take(1)
        bits.number(), bits.number()
        for _ in range(bits.number()):
            bits.number()
    bits.number()  # of references
    bits.take(1)
    bits.number(), bits.number()  # width and height
    return name, _Sequence(number_bits, separate_colours, bool(bits.take(1)))


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


def units(content: bytes, length_bytes: int) -> Iterator[bytes]:
    """The units of a packet: each after its length, or after a start code if that has no bytes.

    A ValueError if the lengths are not those of the packet.
    """
    if not length_bytes:
        yield from filter(None, content.split(b"\0\0\1")[1:])
        return
    place = 0
    while place < len(content):
        start = place + length_bytes
        place = start + int.from_bytes(content[place:start])
        if not start < place <= len(content):
            raise ValueError("units of other lengths than the packet's")
        yield content[start:place]


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
