"""Frames of `read_clip` and `read_whole` against a plain decode of all frames."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from slowfast_lara.data import video as video_module
from slowfast_lara.data.regions import Region
from slowfast_lara.data.sources import open_frames
from slowfast_lara.data.video import count_frames, read_clip, read_timestamps, read_whole
from slowfast_lara.errors import DecodeError
from tests.helpers.videos import (
    B_FRAMES,
    NEEDS_REAL_VIDEOS,
    VARIABLE_PTS,
    VIDEOS,
    check_frames,
    decode_all,
    real_videos,
    whole_frame,
    write_video,
)

PYRAMID = {"bf": "3", "g": "20", "b-pyramid": "normal", "sc_threshold": "0"}
# Further forms of H.264.
H264 = {
    "prepared.mp4": {"options": {"bf": "7", "g": "16", "x264-params": "b-pyramid=none:b-adapt=0"}},
    "pyramid.mp4": {"options": {"bf": "5", "g": "30", "x264-params": "b-pyramid=strict:ref=4"}},
    "slices.mp4": {"options": {"bf": "3", "g": "12", "x264-params": "slices=4"}},
    "interlaced.mp4": {"options": {"bf": "2", "g": "12", "x264-params": "tff=1"}},
    "with_sound.mp4": {"options": {"bf": "2", "g": "10"}, "audio": True},
    "odd_times.mp4": {"options": {"bf": "2", "g": "10"}, "pts": np.cumsum([7, 90] * 20).tolist()},
    "quicktime.mov": {"options": {"bf": "2", "g": "10"}},
    "refresh.mp4": {"options": {"x264-params": "intra-refresh=1", "g": "10"}},
    "no_key_frames.ts": {"options": {"x264-params": "intra-refresh=1", "g": "300"}},
    "flash.flv": {"options": {"bf": "3", "g": "10"}},
}
# Packets of one NAL unit that is not a frame: SEI, access unit delimiter, filler data.
NO_FRAMES = {
    "sei": bytes([6, 5, 17, *range(16), 1, 0x80]),
    "aud": bytes([9, 0xF0]),
    "filler": bytes([12, 255, 255, 0x80]),
}


def read_one(path: Path, number: int) -> np.ndarray:
    return read_clip(str(path), lambda *_: np.array([number]), whole_frame).pixels[0]


def check_single_frames(path: Path, step: int = 1) -> None:
    """Every frame read by itself is that of a plain decode."""
    for number, frame in list(enumerate(decode_all(path)[0]))[::step]:
        assert np.array_equal(read_one(path, number), frame), number


@pytest.fixture
def whole_reads(monkeypatch) -> list[str]:
    """The paths of `read_whole` calls."""
    paths: list[str] = []

    def noted(path, *args, **options):
        paths.append(path)
        return read_whole(path, *args, **options)

    monkeypatch.setattr(video_module, "read_whole", noted)
    return paths


@pytest.fixture(params=VIDEOS)
def video(request, tmp_path):
    return write_video(tmp_path / request.param, **VIDEOS[request.param])


@pytest.mark.parametrize("read", [read_clip, read_whole])
def test_frames_equal_a_plain_decode(video, read):
    check_frames(video, read)


@pytest.mark.parametrize("name", [*H264, *VIDEOS])
def test_single_frames(tmp_path, name):
    check_single_frames(write_video(tmp_path / name, **{**H264, **VIDEOS}[name]), step=3)


@NEEDS_REAL_VIDEOS
@pytest.mark.parametrize("read", [read_clip, read_whole])
@pytest.mark.parametrize("path", real_videos(), ids=lambda path: path.name)
def test_frames_of_real_videos(path, read):
    check_frames(path, read)


# Key frames after a seek


VARIABLE_MS = np.cumsum([20, 55, 35, 20, 80] * 9).tolist()


@pytest.mark.parametrize("codec", ["msmpeg4", "wmv2", "flv", "mpeg4", "h263p"])
@pytest.mark.parametrize("index", ["none", "cut"])
@pytest.mark.parametrize("pts", [None, VARIABLE_MS], ids=["constant", "variable"])
def test_avi_without_a_whole_index(tmp_path, codec, index, pts):
    """FFmpeg flags packets that the index does not contain as key frames."""
    path = write_video(tmp_path / "a.avi", 45, codec=codec, options={"g": "10"}, pts=pts)
    content = path.read_bytes()
    offset = content.rindex(b"idx1")
    cut = content[: offset + 8 + 16 * 20]
    path.write_bytes(content.replace(b"idx1", b"JUNK") if index == "none" else cut)
    check_single_frames(path, step=2)


@pytest.mark.parametrize("suffix", ["ts", "mpg"])
@pytest.mark.parametrize("codec", ["mpeg4", "mpeg2video"])
def test_seeks_between_key_frames(tmp_path, codec, suffix):
    """Transport and program streams seek to any packet."""
    options = {"g": "10", "bf": "2"}
    path = write_video(tmp_path / f"a.{suffix}", 45, codec=codec, options=options)
    check_single_frames(path, step=2)


def test_a_seek_decodes_only_from_the_key_frame(tmp_path, monkeypatch, whole_reads):
    path = write_video(tmp_path / "a.mp4", 60, options={**PYRAMID, "bf": "2"})
    packets = []
    demux = video_module.demux

    def counted(*args):
        for packet in demux(*args):
            packets.append(packet.pts)
            yield packet

    cached = read_timestamps(str(path))
    monkeypatch.setattr(video_module, "read_timestamps", lambda path: cached)
    monkeypatch.setattr(video_module, "demux", counted)
    read_one(path, 42)
    assert cached.pts[40] in packets and min(packets) >= cached.pts[37] and len(packets) < 9
    assert not whole_reads


def test_a_container_that_cannot_seek(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", options={"g": "8"})
    right = video_module.open_container

    class NoSeek:
        def __init__(self, path):
            self._container = right(path)

        def __getattr__(self, name):
            if name == "seek":
                raise OSError(1, "Operation not permitted")
            return getattr(self._container, name)

    monkeypatch.setattr(video_module, "open_container", NoSeek)
    check_single_frames(path, step=5)


def test_avi_with_a_late_b_frame(tmp_path):
    """Its timestamps are in decode order; the header does not announce B-frames."""
    path = tmp_path / "a.avi"
    rng = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"bf": "3", "g": "40"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(60):
            pixels = np.kron(rng.integers(0, 256, (6, 8, 3), np.uint8), np.ones((8, 8, 1), "u1"))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pict_type = 2 if 0 < number < 25 else 0  # P
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    check_single_frames(path, step=4)


# Frame rates


def test_rate_and_count(video):
    frames, fps = decode_all(video)
    calls = []

    def choose(count, rate):
        calls.append((count, rate))
        return np.arange(count)

    pixels, order = read_whole(str(video), choose, whole_frame)
    assert len(pixels) == len(frames) and calls[-1] == (len(frames), pytest.approx(fps))
    assert count_frames(str(video)) == (len(frames), 0)


@pytest.mark.parametrize("header_rate", [None, 60_000, 0.01])
def test_an_implausible_rate_is_replaced_by_that_of_the_timestamps(
    tmp_path, monkeypatch, header_rate
):
    path = write_video(tmp_path / "a.mp4", fps=24)
    right = video_module.open_container

    class Stream:
        def __init__(self, stream):
            self._stream = stream

        def __getattr__(self, name):
            return header_rate if name == "average_rate" else getattr(self._stream, name)

    class Container:
        def __init__(self, path):
            self._container = right(path)
            self.streams = self
            self.video = [Stream(stream) for stream in self._container.streams.video]

        def demux(self, stream):
            return self._container.demux(stream._stream)

        def __getattr__(self, name):
            return getattr(self._container, name)

    monkeypatch.setattr(video_module, "open_container", Container)
    assert read_timestamps(str(path)).fps == pytest.approx(24)
    with open_frames(str(path)) as (fps, _):
        assert fps == pytest.approx(24)


@pytest.mark.parametrize("suffix", ["avi", "mpg"])
def test_the_rate_of_files_with_a_tick_as_rate(tmp_path, suffix):
    """Their headers have 1000 frames per second or none, and not all packets have pts."""
    path = write_video(tmp_path / f"a.{suffix}", pts=VARIABLE_PTS, options=B_FRAMES)
    seconds = (VARIABLE_PTS[-1] - VARIABLE_PTS[0]) / 1000
    expected = pytest.approx(39 / seconds, rel=0.03)
    assert read_timestamps(str(path)).fps == expected
    with open_frames(str(path)) as (fps, _):
        assert fps == expected


# Videos whose packets are not all frames


def test_a_header_that_counts_too_many(tmp_path):
    path = write_video(tmp_path / "whole.avi", codec="mpeg4")
    cut = tmp_path / "cut.avi"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    frames, _ = decode_all(cut)
    assert 0 < len(frames) < 40
    check_frames(cut, read_whole)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("value", [0, 255])
def test_damaged_packets(tmp_path, suffix, value):
    """Frames that a plain decode conceals or drops are concealed or dropped here, too."""
    path = write_video(tmp_path / f"a{suffix}", options=B_FRAMES)
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    content = path.read_bytes()
    for offset, size in packets[2:20:3]:
        damaged = bytearray(content)
        # After the first header, so that the container stays valid.
        damaged[offset + 16 : offset + size] = bytes([value]) * (size - 16)
        path.write_bytes(damaged)
        check_frames(path, read_whole)


@pytest.mark.parametrize("value", [0, 255])
def test_damage_from_the_first_header_on(tmp_path, value):
    """Damaged packets of non-reference frames give no frames."""
    path = write_video(tmp_path / "a.mp4", options=PYRAMID)
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size, bytes(p)) for p in container.demux(video=0) if p.size]
    content = bytearray(path.read_bytes())
    unreferenced = [packet for packet in packets[1:] if not packet[2][4] & 0x60]
    for offset, size, _ in unreferenced[3:6]:
        content[offset + 5 : offset + size] = bytes([value]) * (size - 5)
    path.write_bytes(content)
    assert len(decode_all(path)[0]) == 37
    check_frames(path, read_whole)


@pytest.mark.parametrize("read", [read_clip, read_whole])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.35, 0.5, 0.65])
def test_a_stream_that_starts_between_key_frames(tmp_path, share, read):
    """Packets before the first key frame give no frames."""
    options = {**B_FRAMES, "g": "12", "x264-params": "open-gop=1:scenecut=0"}
    content = write_video(tmp_path / "whole.ts", options=options).read_bytes()
    cut = tmp_path / "cut.ts"
    cut.write_bytes(content[: 188 * 3] + content[int(share * len(content)) // 188 * 188 :])
    check_frames(cut, read)


def remux(source, result, leave_out=(), insert=None, pts=None) -> None:
    """Copy packets, without some, with an extra one after those given, or with other timestamps."""
    with av.open(str(source)) as container, av.open(str(result), "w") as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for number, packet in enumerate(p for p in container.demux(stream) if p.size):
            time, dts, tick = packet.pts, packet.dts, packet.time_base
            half = packet.duration // 2
            if number not in leave_out:
                packet.stream, packet.pts = copy, time if pts is None else pts[number]
                out.mux(packet)
            if insert and number in (10, 25):
                extra = av.Packet(len(insert).to_bytes(4) + insert)
                extra.pts, extra.dts, extra.time_base = time + half, dts + half, tick
                extra.stream = copy
                out.mux(extra)


@pytest.mark.parametrize("suffix", ["webm", "mkv", "nut"])
def test_hidden_frames_of_vp8(tmp_path, suffix):
    """Alternate reference frames have packets of their own, but are not shown."""
    source = write_video(tmp_path / f"a.{suffix}", 60, codec="libvpx", options={"g": "20"})
    path = tmp_path / f"hidden.{suffix}"
    with av.open(str(source)) as container, av.open(str(path), "w") as out:
        stream = container.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for number, packet in enumerate(p for p in container.demux(stream) if p.size):
            content, time, tick = bytes(packet), packet.pts * 2, packet.time_base / 2
            contents = [content]
            if number % 7 == 5 and not packet.is_keyframe:
                contents.append(bytes([content[0] & ~0x10]) + content[1:])
            for offset, content in enumerate(contents):
                new = av.Packet(content)
                new.stream, new.time_base = copy, tick
                new.pts = new.dts = time + offset
                new.is_keyframe = packet.is_keyframe
                out.mux(new)
    with av.open(str(path)) as container:
        assert sum(packet.size > 0 for packet in container.demux(video=0)) > 65
    assert len(decode_all(path)[0]) == 60
    check_single_frames(path, step=3)
    check_frames(path, read_clip)
    check_frames(path, read_whole)


@pytest.mark.parametrize("name", NO_FRAMES)
def test_packets_that_are_not_frames(tmp_path, name):
    source = write_video(tmp_path / "a.mp4", options=PYRAMID)
    remux(source, tmp_path / "more.mp4", insert=NO_FRAMES[name])
    assert len(decode_all(tmp_path / "more.mp4")[0]) == 40
    check_frames(tmp_path / "more.mp4", read_whole)


@pytest.mark.parametrize("leave_out", [{1}, {5}, {12, 13}, {16}, {17}, {20}, {20, 21}])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_missing_packets(tmp_path, suffix, leave_out):
    source = write_video(tmp_path / f"a{suffix}", options=PYRAMID)
    path = tmp_path / f"hole{suffix}"
    remux(source, path, leave_out)
    frames, _ = decode_all(path)
    for step in (1, 2, 4):
        pixels, order = read_whole(str(path), lambda n, _, s=step: np.arange(0, n, s), whole_frame)
        assert np.array_equal(pixels[order], frames[::step])


def test_timestamps_that_are_not_in_presentation_order(tmp_path):
    path = write_video(tmp_path / "a.mp4", options=PYRAMID)
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        unreferenced = [n for n, packet in enumerate(packets[1:], 1) if not bytes(packet)[4] & 0x60]
        times = [packet.pts for packet in packets]
    times[unreferenced[1]] = times[unreferenced[-1]] + 1
    remux(path, tmp_path / "b.mp4", pts=times)
    check_frames(tmp_path / "b.mp4", read_whole)


def test_a_wrong_number_of_packets(tmp_path, monkeypatch):
    path = write_video(tmp_path / "whole.avi", codec="mpeg4")
    frames, _ = decode_all(path)
    right = read_timestamps(str(path))
    wrong = right._replace(num_frames=len(frames) + 3)
    monkeypatch.setattr(video_module, "read_timestamps", lambda path: wrong)
    opened, open_container = [], video_module.open_container
    monkeypatch.setattr(
        video_module, "open_container", lambda path: opened.append(path) or open_container(path)
    )
    pixels, order = read_whole(str(path), lambda count, fps: np.arange(count), whole_frame)
    assert np.array_equal(pixels, frames) and order.tolist() == list(range(len(frames)))
    assert len(opened) == 1
    pixels, order = read_whole(str(path), lambda count, fps: np.arange(count)[-1:], whole_frame)
    assert np.array_equal(pixels[order][0], frames[-1]) and len(opened) == 3


# Regions, file names, foreign files


def test_region_and_size(tmp_path):
    path = write_video(tmp_path / "a.mp4", size=(48, 64), options={"g": "8"})
    frames, _ = decode_all(path)
    region = Region(8, 16, 24, 32, 24, 32)
    for read in (read_clip, read_whole):
        pixels, _ = read(str(path), lambda count, fps: np.array([13]), lambda *size: region)
        assert np.array_equal(pixels[0], frames[13][8:32, 16:48])
    scaled = region._replace(out_height=20, out_width=30)
    clips = [
        read(str(path), lambda count, fps: np.arange(count), lambda *size: scaled).pixels
        for read in (read_clip, read_whole)
    ]
    assert clips[0].shape == (40, 20, 30, 3) and np.array_equal(*clips)


def test_a_colon_in_the_name(tmp_path):
    path = write_video(tmp_path / "plain.mp4")
    path = path.rename(tmp_path / "http:a b.mp4")
    assert count_frames(str(path)) == (40, 0)


def test_text_is_not_a_video(tmp_path):
    path = tmp_path / "notes.txt"  # FFmpeg would render it
    path.write_text("a text\n" * 1000)
    with pytest.raises(DecodeError, match="notes.txt"):
        count_frames(str(path))


def test_a_playlist_is_not_followed(tmp_path):
    write_video(tmp_path / "a.ts")
    path = tmp_path / "list.m3u8"
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1,\na.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(DecodeError, match="list.m3u8"):
        count_frames(str(path))


@pytest.mark.parametrize("read", [read_clip, read_whole])
def test_errors_name_the_file(tmp_path, read):
    for name, content in (("a.mp4", b"no video"), ("b.mp4", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DecodeError, match=name):
            read(str(tmp_path / name), lambda count, fps: np.arange(3), whole_frame)
    with pytest.raises(DecodeError, match="absent"):
        read(str(tmp_path / "absent.mp4"), lambda count, fps: np.arange(3), whole_frame)
