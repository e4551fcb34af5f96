"""Transcoding of one video: same frames and timestamps, upright, scaled, close key frames."""

from __future__ import annotations

import errno
import itertools
import os
import struct
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from slowfast_lara.data.video import count_frames
from slowfast_lara.errors import DecodeError
from slowfast_lara.prepare.reencode import Options, PreparedVideo, prepare_video, target_size
from tests.helpers.pictures import upright, write_pictures
from tests.helpers.videos import NEEDS_REAL_VIDEOS, decode_all, real_videos, write_video

SMALL = Options(short_side=48, preset="veryfast", crf=12)


def seconds_of(path: Path) -> np.ndarray:
    """Presentation time of each frame, from 0."""
    with av.open(str(path)) as container:
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    return np.array(times) - times[0]


def check(source: Path, options: Options = SMALL, turn=lambda image: image) -> PreparedVideo:
    """Prepare a video and compare it with PyAV's frames of the source, made upright by `turn`."""
    result = source.with_name("result.mp4")
    prepared = prepare_video(str(source), str(result), options)
    assert count_frames(str(result)) == (prepared.frames, 0)
    assert count_frames(str(source))[0] == prepared.frames
    before, rate = decode_all(source)
    after, new_rate = decode_all(result)
    assert new_rate == pytest.approx(rate, rel=1e-6)
    assert len(after) == len(before)
    for old, new in zip(before, after):
        old = cv2.resize(turn(old), new.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(old.astype(float) - new).mean() < 5
    with av.open(str(result)) as container:
        assert len(container.streams) == 1
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt in ("yuv420p", "yuvj420p")
        assert (stream.sample_aspect_ratio or 1) == 1
        assert stream.height % 2 == stream.width % 2 == 0
        assert min(stream.height, stream.width) <= options.short_side
        packets = [packet for packet in container.demux(stream) if packet.size]
        keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
        assert keys[0] == 0
        gaps = [b - a for a, b in itertools.pairwise([*keys, len(packets)])]
        assert max(gaps) <= options.key_frames
    with av.open(str(result)) as container:
        first = next(container.decode(video=0))
        assert first.rotation == 0 and not first.interlaced_frame
    assert list(source.parent.glob(".writing-*")) == []
    return prepared


SOURCES = {
    "long_gop.mp4": ("libx264", "yuv420p", {"options": {"g": "300"}}),
    "odd.mkv": ("ffv1", "yuv420p", {"size": (95, 131)}),
    "odd_444.mp4": ("libx264", "yuv444p", {"size": (97, 75)}),
    "ten_bit.mkv": ("libx265", "yuv420p10le", {}),
    "hevc.mp4": ("libx265", "yuv420p", {"rate": Fraction(30000, 1001)}),
    "vp9.webm": ("libvpx-vp9", "yuv420p", {"options": {"deadline": "realtime"}}),
    "vp9_12fps.webm": ("libvpx-vp9", "yuv420p", {"rate": Fraction(12)}),
    "vp8.webm": ("libvpx", "yuv420p", {"options": {"deadline": "realtime"}}),
    "av1.mp4": ("libsvtav1", "yuv420p", {"options": {"preset": "12"}}),
    "interlaced.mp4": ("libx264", "yuv420p", {"options": {"x264-params": "tff=1"}}),
    "interlaced.ts": ("mpeg2video", "yuv420p", {"options": {"flags": "+ildct+ilme"}}),
    "b_frames.avi": ("mpeg4", "yuv420p", {"options": {"bf": "2"}}),
    "rgb.mkv": ("ffv1", "bgr0", {}),
    "full_range.avi": ("mjpeg", "yuvj420p", {"colors": (5, 2)}),
    "bt709.mp4": ("libx264", "yuv420p", {"colors": (1, 1)}),
    "small.webm": ("libvpx-vp9", "yuv420p", {"size": (32, 40)}),
    "one_frame.mp4": ("libx264", "yuv420p", {"frames": 1}),
    "prores.mov": ("prores_ks", "yuv422p10le", {}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_source_formats(tmp_path, name):
    codec, pix_fmt, options = SOURCES[name]
    source = write_pictures(tmp_path / name, codec, pix_fmt, **options)
    prepared = check(source)
    assert prepared.method == "encoded" and prepared.damage == ""
    assert prepared.frames == options.get("frames", 35)
    height, width = options.get("size", (96, 128))
    after, _ = decode_all(tmp_path / "result.mp4")
    assert min(after[0].shape[:2]) == min(48, height, width)
    assert after[0].shape[1] / after[0].shape[0] == pytest.approx(width / height, rel=0.03)
    if "interlaced" in name:
        with av.open(str(source)) as container:
            assert next(container.decode(video=0)).interlaced_frame


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_variable_rate_keeps_timestamps(tmp_path, suffix):
    steps = np.random.default_rng(0).integers(7, 90, 35)
    source = write_pictures(
        tmp_path / f"a.{suffix}", milliseconds=[500 + int(t) for t in steps.cumsum()]
    )
    result = tmp_path / "result.mp4"
    prepare_video(str(source), str(result), SMALL)
    before, after = seconds_of(source), seconds_of(result)
    assert np.abs(np.diff(before) - np.diff(before)[0]).max() > 0.02
    np.testing.assert_allclose(after, before, atol=1e-4)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_rotation(tmp_path, turn, mirror):
    source = write_pictures(tmp_path / "a.mp4", turn=turn, mirror=mirror, frames=5)
    check(source, turn=upright(turn, mirror))
    shape = decode_all(tmp_path / "result.mp4")[0][0].shape
    assert shape[:2] == ((64, 48) if turn % 180 else (48, 64))


def test_display_matrix_of_phones(tmp_path):
    """Phones held upright write (a b; c d) = (0 1; -1 0): rotate clockwise for display."""
    source = write_pictures(tmp_path / "a.mp4", frames=5)
    content = bytearray(source.read_bytes())
    offset = content.index(b"tkhd") + 44
    one = 1 << 16
    assert struct.unpack_from(">5i", content, offset) == (one, 0, 0, 0, one)
    struct.pack_into(">5i", content, offset, 0, one, 0, -one, 0)
    source.write_bytes(content)
    check(source, turn=lambda image: cv2.rotate(image, cv2.ROTATE_90_CLOCKWISE))


def test_small_rotated_video_is_encoded(tmp_path):
    source = write_pictures(tmp_path / "a.mp4", turn=90, frames=5, options={"g": "5"})
    assert check(source, Options(), turn=upright(90, False)).method == "encoded"


@pytest.mark.parametrize("aspect, shape", [((2, 1), (48, 128)), ((1, 2), (96, 64))])
def test_square_pixels(tmp_path, aspect, shape):
    source = write_pictures(tmp_path / "a.mp4", pixel_aspect=Fraction(*aspect), frames=5)
    check(source, Options())
    assert decode_all(tmp_path / "result.mp4")[0][0].shape[:2] == shape


def test_target_size():
    assert target_size(1280, 720, None, 256) == (456, 256)
    assert target_size(720, 1280, Fraction(1), 256) == (256, 456)
    assert target_size(341, 255, None, 256) == (340, 254)
    assert target_size(720, 576, Fraction(16, 15), 256) == (342, 256)
    assert target_size(64, 48, Fraction(1, 1000), 256) == (64, 48)
    assert target_size(1, 3, None, 256) == (2, 2)


BT709, BT601, LIMITED, FULL = 1, 5, 1, 2


@pytest.mark.parametrize(
    "first, then",
    [
        ((BT709, LIMITED), (BT601, LIMITED)),
        ((BT601, LIMITED), (BT709, FULL)),
        ((BT709, FULL), (BT601, LIMITED)),
        (None, (BT709, LIMITED)),
        (None, (BT601, FULL)),
    ],
)
def test_colour_matrix_and_range_change_within_a_video(tmp_path, first, then):
    streams = [
        write_pictures(tmp_path / "a.h264", frames=8, colors=colors).read_bytes()
        for colors in (first, then)
    ]
    source = tmp_path / "both.h264"
    source.write_bytes(b"".join(streams))
    before = decode_all(source)[0]
    assert np.abs(before[0].astype(float) - before[8]).mean() < 3  # the same picture
    prepare_video(str(source), str(tmp_path / "result.mp4"), Options(96, crf=4))
    after = decode_all(tmp_path / "result.mp4")[0]
    for old, new in zip(before, after, strict=True):
        assert np.abs(old.astype(float) - new).mean() < 2


@pytest.mark.parametrize("key_frames", [8, 300])
def test_edit_list(tmp_path, key_frames):
    """Frames hidden by an edit list are not in the result."""
    source = write_pictures(tmp_path / "a.mp4", options={"g": str(key_frames), "bf": "2"})
    content = bytearray(source.read_bytes())
    offset = content.index(b"elst") + 4
    _, count, length, start = struct.unpack(">IIIi", content[offset : offset + 16])
    assert count == 1 and length > 1000
    # The movie's time base is 1/1000 s, the track's 1/12800 s.
    struct.pack_into(">Ii", content, offset + 8, length - 400, start + 10 * 512)
    source.write_bytes(content)
    prepared = check(source, Options())
    assert prepared.frames == 25 == count_frames(str(source))[0]
    assert prepared.damage == ""


def test_small_videos_are_remuxed(tmp_path):
    every_16 = {"g": "16", "bf": "2", "sc_threshold": "0"}
    source = write_video(tmp_path / "a.mp4", 40, options=every_16, audio=True)
    assert check(source).method == "remuxed"
    assert all(
        (old == new).all()
        for old, new in zip(decode_all(source)[0], decode_all(tmp_path / "result.mp4")[0])
    )
    matroska = write_video(tmp_path / "a.mkv", 40, options=every_16)
    assert check(matroska).method == "remuxed"
    assert check(matroska, SMALL._replace(link=True)).method == "remuxed"
    assert check(source, SMALL._replace(key_frames=15)).method == "encoded"
    smaller = SMALL._replace(short_side=46)
    assert prepare_video(str(source), str(tmp_path / "b.mp4"), smaller).method == "encoded"
    ten_bit = write_pictures(tmp_path / "c.mp4", "libx264", "yuv420p10le", options={"g": "9"})
    assert check(ten_bit, Options()).method == "encoded"


def test_link(tmp_path):
    source = write_video(tmp_path / "a.mp4", 40, options={"g": "16"})
    result = tmp_path / "out" / "a.mp4"
    prepared = prepare_video(str(source), str(result), SMALL._replace(link=True))
    assert prepared.method == "linked" and prepared.disk_space == 0
    assert result.is_symlink() and result.samefile(source)


def test_link_to_read_only_source(tmp_path, monkeypatch):
    """A read-only disk is simulated: root may write any file."""
    source = write_video(tmp_path / "a.mp4", 40, options={"g": "16"})
    opening = os.open

    def read_only(path, flags, *rest, **more):
        if os.path.realpath(path) == str(source) and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opening(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    result = tmp_path / "out" / "a.mp4"
    assert prepare_video(str(source), str(result), SMALL._replace(link=True)).method == "linked"


def test_damage_is_reported(tmp_path):
    source = write_video(tmp_path / "a.avi", 40, codec="mpeg4")
    content = bytearray(source.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 3000] = bytes(3000)
    source.write_bytes(content)
    prepared = check(source)
    assert prepared.damage


def test_change_of_size(tmp_path):
    """Two concatenated raw streams: all frames get the size of the first."""
    first = write_pictures(tmp_path / "1.h264", frames=5)
    second = write_pictures(tmp_path / "2.h264", frames=7, size=(64, 128))
    source = tmp_path / "both.ts"
    source.write_bytes(first.read_bytes() + second.read_bytes())
    prepared = prepare_video(str(source), str(tmp_path / "result.mp4"), SMALL)
    assert prepared.frames == 12
    assert {frame.shape for frame in decode_all(tmp_path / "result.mp4")[0]} == {(48, 64, 3)}


def test_no_frames_no_result(tmp_path):
    source = tmp_path / "a.mp4"
    source.write_bytes(b"no video" * 100)
    with pytest.raises(DecodeError, match=r"a\.mp4: "):
        prepare_video(str(source), str(tmp_path / "out" / "a.mp4"), SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["frames", "timestamps", "rate"])
def test_wrong_result_is_rejected(tmp_path, monkeypatch, wrong):
    """The muxer drops a frame, shifts one, or halves the rate."""
    from slowfast_lara.prepare import reencode

    def mux(out, stream, packets, numbers, timing):
        if wrong == "frames":
            packets, numbers = packets[:-1], numbers[:-1]
        elif wrong == "timestamps":
            timing = timing._replace(pts=[*timing.pts[:-1], timing.pts[-1] + 1])
        else:
            timing = timing._replace(time_base=timing.time_base * 2)
        original(out, stream, packets, numbers, timing)

    original = reencode.mux
    monkeypatch.setattr(reencode, "mux", mux)
    source = write_pictures(tmp_path / "a.mp4")
    result = tmp_path / "result.mp4"
    result.write_bytes(b"before")
    with pytest.raises(DecodeError, match="result has"):
        prepare_video(str(source), str(result), SMALL)
    assert result.read_bytes() == b"before"
    assert list(tmp_path.glob(".writing-*")) == []


@NEEDS_REAL_VIDEOS
@pytest.mark.slow
def test_real_videos(tmp_path):
    for path in real_videos():
        source = tmp_path / path.name
        source.symlink_to(path)
        check(source, Options())
