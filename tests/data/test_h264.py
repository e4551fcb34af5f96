"""What `read_all` leaves out of H.264: never a packet that is no frame, nor after a hole."""

from __future__ import annotations

import av
import numpy as np
import pytest

from slowfast_lara.data import decode
from slowfast_lara.data.decode import read_all
from slowfast_lara.data.h264 import FrameOrder
from tests.data.test_decode import check_against_all_frames, whole
from tests.helpers.videos import NEEDS_REAL_VIDEOS, decode_all, real_videos, write_video

PYRAMID = {"bf": "3", "g": "20", "b-pyramid": "normal", "sc_threshold": "0"}
# In one packet: additional information, the start of a picture, filling.
NO_FRAMES = {
    "sei": bytes([6, 5, 17, *range(16), 1, 0x80]),
    "aud": bytes([9, 0xF0]),
    "filler": bytes([12, 255, 255, 0x80]),
}


@pytest.fixture
def whole_decodes(monkeypatch):
    """A list that grows with each video that is decoded whole."""
    decoded = []
    decode_whole = decode._decode_all
    monkeypatch.setattr(
        decode, "_decode_all", lambda *args: decoded.append(1) or decode_whole(*args)
    )
    return decoded


def remux(source, result, leave_out=(), insert=None) -> None:
    """Without some packets, and with another one behind those given."""
    with av.open(str(source)) as container, av.open(str(result), "w") as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for number, packet in enumerate(p for p in container.demux(stream) if p.size):
            pts, dts, tick = packet.pts, packet.dts, packet.time_base
            half = packet.duration // 2
            if number not in leave_out:
                packet.stream = copy
                out.mux(packet)
            if insert and number in (10, 25):
                extra = av.Packet(len(insert).to_bytes(4) + insert)
                extra.pts, extra.dts, extra.time_base = pts + half, dts + half, tick
                extra.stream = copy
                out.mux(extra)


@pytest.mark.parametrize("name", NO_FRAMES)
def test_packets_that_are_no_frames(tmp_path, name):
    source = write_video(tmp_path / "a.mp4", options=PYRAMID)
    remux(source, tmp_path / "more.mp4", insert=NO_FRAMES[name])
    assert len(decode_all(tmp_path / "more.mp4")[0]) == 40
    check_against_all_frames(tmp_path / "more.mp4", read_all)


@pytest.mark.parametrize("value", [0, 255])
def test_damage_from_the_first_header_on(tmp_path, value):
    """Of packets that no other refers to: they are no frames."""
    path = write_video(tmp_path / "a.mp4", options=PYRAMID)
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size, bytes(p)) for p in container.demux(video=0) if p.size]
    content = bytearray(path.read_bytes())
    unreferenced = [packet for packet in packets[1:] if not packet[2][4] & 0x60]
    for place, size, _ in unreferenced[3:6]:
        content[place + 5 : place + size] = bytes([value]) * (size - 5)
    path.write_bytes(content)
    assert len(decode_all(path)[0]) == 37
    check_against_all_frames(path, read_all)


@pytest.mark.parametrize("leave_out", [{1}, {5}, {12, 13}, {16}, {17}, {20}, {20, 21}])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_packets_that_are_missing(tmp_path, suffix, leave_out):
    source = write_video(tmp_path / f"a{suffix}", options=PYRAMID)
    remux(source, tmp_path / f"hole{suffix}", leave_out)
    frames, _ = decode_all(tmp_path / f"hole{suffix}")
    for step in (1, 2, 4):
        pixels, order = read_all(
            str(tmp_path / f"hole{suffix}"), lambda n, fps, step=step: np.arange(0, n, step), whole
        )
        assert np.array_equal(pixels[order], frames[::step])


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".ts", ".flv"])
@pytest.mark.parametrize(
    "options",
    [
        PYRAMID,
        {"bf": "7", "x264-params": "b-pyramid=none:slices=3"},
        {"bf": "0", "g": "300"},
        {"profile": "baseline"},
    ],
    ids=str,
)
def test_whole_videos_take_the_short_way(tmp_path, suffix, options, whole_decodes):
    path = write_video(tmp_path / f"a{suffix}", frames=70, options=options)
    check_against_all_frames(path, read_all)
    assert not whole_decodes


@NEEDS_REAL_VIDEOS
@pytest.mark.parametrize("path", real_videos("*.mp4"), ids=lambda path: path.name)
def test_real_videos_take_the_short_way(path, whole_decodes):
    read_all(str(path), lambda count, fps: np.arange(0, count, 50), whole)
    assert not whole_decodes


def test_what_fails_is_not_decoded_to_its_end(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", options=PYRAMID)
    right, frames = decode.referenced_frames, []

    def counted(*args):
        for frame in right(*args):
            frames.append(frame.pts)
            yield frame

    monkeypatch.setattr(decode, "referenced_frames", counted)
    monkeypatch.setattr(decode, "_keep", lambda frames, *_: next(frames) and None)
    read_all(str(path), lambda count, fps: np.arange(count), whole)
    assert len(frames) == 1


# Headers made by hand, by the standard


def unsigned(value: int) -> str:
    digits = f"{value + 1:b}"
    return "0" * (len(digits) - 1) + digits


def unit(header: int, *parts: str) -> bytes:
    """With a 3 where two zeros would be followed by at most a 3."""
    bits = "".join(parts) + "1"
    content = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8))
    escaped = bytearray()
    for byte in content:
        if escaped[-2:] == b"\0\0" and byte <= 3:
            escaped.append(3)
        escaped.append(byte)
    return b"\0\0\1" + bytes([header]) + bytes(escaped)


def settings(length: int, separate_colours: bool, only_frames: bool, order: str) -> bytes:
    """For numbers of `length` bits."""
    colours = unsigned(3) + str(int(separate_colours)) + unsigned(0) * 2 + "00"
    sequence = [
        f"{244:08b}",
        "0" * 8,
        f"{40:08b}",
        unsigned(2),
        colours,
        unsigned(length - 4),
        order,
    ]
    sequence += [unsigned(4), "0", unsigned(9), unsigned(9), str(int(only_frames)), "1"]
    return unit(0x67, *sequence) + unit(0x68, unsigned(31), unsigned(2), "1")


ORDERS = {"by places": unsigned(0) + unsigned(4), "as they come": unsigned(2)}


@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("separate_colours", [False, True])
@pytest.mark.parametrize("only_frames", [False, True])
def test_numbers_of_frames(length, order, separate_colours, only_frames):
    def frame(header: int, number: int, *, field: str = "0", kind: int = 0) -> bytes:
        colour = "00" if separate_colours else ""
        number_bits = f"{number % 2**length:0{length}b}"
        parts = (unsigned(0), unsigned(kind), unsigned(31), colour, number_bits)
        start = unsigned(2) if header == 0x65 else ""
        return unit(header, *parts, "" if only_frames else field, start, "0" * 40)

    frames = FrameOrder(settings(length, separate_colours, only_frames, ORDERS[order]))
    with pytest.raises(ValueError):
        frames.add(frame(0x41, 1), 0)
    assert frames.add(frame(0x65, 0), 0)
    for number in range(1, 40):
        assert frames.add(frame(0x41, number), number)
    assert not frames.add(frame(0x01, 40), 40) and not frames.add(frame(0x01, 40), 41)
    assert frames.add(frame(0x41, 40), 42)
    for wrong in (
        frame(0x41, 42),
        frame(0x01, 40),
        frame(0x41, 41, kind=10),
        frame(0x41, 41) + frame(0x01, 41),
        frame(0x41, 41) + frame(0x41, 41),
        frame(0x41, 41)[:5],
        unit(0x41, unsigned(0), unsigned(0), unsigned(8), "0" * 40),
        b"",
    ):
        with pytest.raises(ValueError):
            frames.add(wrong, 43)
    if not only_frames:
        with pytest.raises(ValueError, match="field"):
            frames.add(frame(0x41, 41, field="1"), 43)
    assert frames.add(frame(0x41, 41), 43) and frames.add(frame(0x65, 0), 44)
    assert frames.is_that_of_times()


@pytest.mark.parametrize("wrong", [None, 3, 150, 420])
def test_places_of_frames(wrong):
    """In 8 bits, two for each frame: every third is shown before the two that come first."""
    shown = [place for group in range(0, 450, 3) for place in (group + 2, group, group + 1)]
    frames = FrameOrder(settings(16, False, True, ORDERS["by places"]))
    start = (unsigned(0), unsigned(7), unsigned(31), "0" * 16, unsigned(0), "0" * 8)
    for fresh in range(2):
        frames.add(unit(0x65, *start), 1000 * fresh)
        number = 0
        for place in shown:
            is_reference = place % 3 == 2
            place_bits = f"{2 * (place + 1) % 256:08b}"
            parts = (unsigned(0), unsigned(5), unsigned(31), f"{number + 1:016b}", place_bits)
            time = 1000 * fresh + 1 + place - (4 if place == wrong else 0)
            assert frames.add(unit(0x41 if is_reference else 0x01, *parts), time) == is_reference
            number += is_reference
    assert frames.is_that_of_times() == (wrong is None)


def test_an_order_that_is_not_read():
    steps = unsigned(1) + "0" + unsigned(3) * 2 + unsigned(2) + unsigned(5) * 2
    with pytest.raises(ValueError, match="order of pictures"):
        FrameOrder(settings(16, False, True, steps))


def test_times_that_are_not_in_the_order_of_showing(tmp_path):
    """A whole decode gives frames as they are shown, whatever their times."""
    path = write_video(tmp_path / "a.mp4", options=PYRAMID)
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        unreferenced = [n for n, packet in enumerate(packets[1:], 1) if not bytes(packet)[4] & 0x60]
        times = [packet.pts for packet in packets]
        times[unreferenced[1]] = times[unreferenced[-1]] + 1
        with av.open(str(tmp_path / "b.mp4"), "w") as out:
            copy = out.add_stream_from_template(container.streams.video[0])
            for packet, time in zip(packets, times):
                packet.pts, packet.stream = time, copy
                out.mux(packet)
    check_against_all_frames(tmp_path / "b.mp4", read_all)
