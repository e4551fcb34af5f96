"""One video made quick to read: the same frames at the same times, upright, small."""

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
from slowfast_lara.prepare.geometry import target_size
from slowfast_lara.prepare.reencode import Options, Outcome, prepare_video
from tests.helpers.videos import NEEDS_REAL_VIDEOS, decode_all, real_videos, write_video

SMALL = Options(short_side=48, preset="veryfast", crf=12)


def picture(height: int, width: int, number: int) -> np.ndarray:
    """Smooth, with another colour in every corner, and a bar that moves."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    image = np.stack([y * 200 + 20, x * 200 + 20, (1 - x) * y * 200 + 20], axis=-1)
    left = number * width // 40
    image[:, left : left + width // 8] += 30
    return image.clip(0, 255).astype(np.uint8)


def write(
    path: Path,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    *,
    frames: int = 35,
    size: tuple[int, int] = (96, 128),
    rate: Fraction = Fraction(25),
    milliseconds: list[int] | None = None,
    options: dict[str, str] | None = None,
    pixel_aspect: Fraction | None = None,
    turn: int = 0,
    mirror: bool = False,
    colors: tuple[int, int] | None = None,
) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = pix_fmt
        if turn or mirror:
            stream.set_display_rotation(turn, hflip=mirror)
        if pixel_aspect:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        if colors:
            stream.codec_context.colorspace, stream.codec_context.color_range = colors
        if milliseconds:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(*size, number), format="rgb24")
            if colors:
                frame = frame.reformat(
                    format=pix_fmt, dst_colorspace=colors[0], dst_color_range=colors[1]
                )
            if milliseconds:
                frame.pts, frame.time_base = milliseconds[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def seconds_of(path: Path) -> np.ndarray:
    """When each frame is shown, from 0 on."""
    with av.open(str(path)) as container:
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    return np.array(times) - times[0]


def check(source: Path, options: Options = SMALL, turn=lambda image: image) -> Outcome:
    """Prepare a video, and compare with what PyAV decodes of it; `turn` makes that upright."""
    result = source.with_name("result.mp4")
    outcome = prepare_video(str(source), str(result), options)
    assert count_frames(str(result)) == (outcome.frames, 0)
    assert count_frames(str(source))[0] == outcome.frames
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
    return outcome


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
def test_every_kind_of_source(tmp_path, name):
    codec, pix_fmt, options = SOURCES[name]
    source = write(tmp_path / name, codec, pix_fmt, **options)
    outcome = check(source)
    assert outcome.how == "encoded" and outcome.damage == ""
    assert outcome.frames == options.get("frames", 35)
    height, width = options.get("size", (96, 128))
    after, _ = decode_all(tmp_path / "result.mp4")
    assert min(after[0].shape[:2]) == min(48, height, width)
    assert after[0].shape[1] / after[0].shape[0] == pytest.approx(width / height, rel=0.03)
    if "interlaced" in name:
        with av.open(str(source)) as container:
            assert next(container.decode(video=0)).interlaced_frame


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_variable_rate_keeps_its_times(tmp_path, suffix):
    steps = np.random.default_rng(0).integers(7, 90, 35)
    source = write(tmp_path / f"a.{suffix}", milliseconds=[500 + int(t) for t in steps.cumsum()])
    result = tmp_path / "result.mp4"
    prepare_video(str(source), str(result), SMALL)
    before, after = seconds_of(source), seconds_of(result)
    assert np.abs(np.diff(before) - np.diff(before)[0]).max() > 0.02
    np.testing.assert_allclose(after, before, atol=1e-4)


def upright(turn: int, mirror: bool):
    """As FFmpeg shows it: turned counter-clockwise, and then mirrored."""
    return lambda image: np.rot90(image, turn // 90)[:, :: -1 if mirror else 1]


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_rotation(tmp_path, turn, mirror):
    source = write(tmp_path / "a.mp4", turn=turn, mirror=mirror, frames=5)
    check(source, turn=upright(turn, mirror))
    shape = decode_all(tmp_path / "result.mp4")[0][0].shape
    assert shape[:2] == ((64, 48) if turn % 180 else (48, 64))


def test_a_telephone_held_upright(tmp_path):
    """These write (a b; c d) = (0 1; -1 0): to be shown turned clockwise."""
    source = write(tmp_path / "a.mp4", frames=5)
    content = bytearray(source.read_bytes())
    place = content.index(b"tkhd") + 44
    one = 1 << 16
    assert struct.unpack_from(">5i", content, place) == (one, 0, 0, 0, one)
    struct.pack_into(">5i", content, place, 0, one, 0, -one, 0)
    source.write_bytes(content)
    check(source, turn=lambda image: cv2.rotate(image, cv2.ROTATE_90_CLOCKWISE))


def test_a_small_rotated_video_is_encoded(tmp_path):
    source = write(tmp_path / "a.mp4", turn=90, frames=5, options={"g": "5"})
    assert check(source, Options(), turn=upright(90, False)).how == "encoded"


@pytest.mark.parametrize("aspect, shape", [((2, 1), (48, 128)), ((1, 2), (96, 64))])
def test_pixels_become_square(tmp_path, aspect, shape):
    source = write(tmp_path / "a.mp4", pixel_aspect=Fraction(*aspect), frames=5)
    check(source, Options())
    assert decode_all(tmp_path / "result.mp4")[0][0].shape[:2] == shape


def test_sizes():
    assert target_size(1280, 720, None, 256) == (456, 256)
    assert target_size(720, 1280, Fraction(1), 256) == (256, 456)
    assert target_size(341, 255, None, 256) == (340, 254)
    assert target_size(720, 576, Fraction(16, 15), 256) == (342, 256)
    assert target_size(64, 48, Fraction(1, 1000), 256) == (64, 48)
    assert target_size(1, 3, None, 256) == (2, 2)


@pytest.mark.parametrize("key_frames", [8, 300])
def test_edit_list(tmp_path, key_frames):
    """Frames that the edit list hides are not in the result."""
    source = write(tmp_path / "a.mp4", options={"g": str(key_frames), "bf": "2"})
    content = bytearray(source.read_bytes())
    place = content.index(b"elst") + 4
    _, count, length, start = struct.unpack(">IIIi", content[place : place + 16])
    assert count == 1 and length > 1000
    # The movie counts in milliseconds, the track in 12800 ticks a second.
    struct.pack_into(">Ii", content, place + 8, length - 400, start + 10 * 512)
    source.write_bytes(content)
    outcome = check(source, Options())
    assert outcome.frames == 25 == count_frames(str(source))[0]
    assert outcome.damage == ""


def test_small_videos_are_not_encoded_again(tmp_path):
    every_16 = {"g": "16", "bf": "2", "sc_threshold": "0"}
    source = write_video(tmp_path / "a.mp4", 40, options=every_16, audio=True)
    assert check(source).how == "remuxed"
    assert all(
        (old == new).all()
        for old, new in zip(decode_all(source)[0], decode_all(tmp_path / "result.mp4")[0])
    )
    matroska = write_video(tmp_path / "a.mkv", 40, options=every_16)
    assert check(matroska).how == "remuxed"
    assert check(matroska, SMALL._replace(link=True)).how == "remuxed"
    assert check(source, SMALL._replace(key_frames=15)).how == "encoded"
    smaller = SMALL._replace(short_side=46)
    assert prepare_video(str(source), str(tmp_path / "b.mp4"), smaller).how == "encoded"
    ten_bit = write(tmp_path / "c.mp4", "libx264", "yuv420p10le", options={"g": "9"})
    assert check(ten_bit, Options()).how == "encoded"


def test_link(tmp_path):
    source = write_video(tmp_path / "a.mp4", 40, options={"g": "16"})
    result = tmp_path / "out" / "a.mp4"
    outcome = prepare_video(str(source), str(result), SMALL._replace(link=True))
    assert outcome.how == "linked" and outcome.disk_space == 0
    assert result.is_symlink() and result.samefile(source)


def test_link_to_what_cannot_be_written(tmp_path, monkeypatch):
    """As on a disk that is only read: root may write any file elsewhere."""
    source = write_video(tmp_path / "a.mp4", 40, options={"g": "16"})
    opening = os.open

    def read_only(path, flags, *rest, **more):
        if os.path.realpath(path) == str(source) and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return opening(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    result = tmp_path / "out" / "a.mp4"
    assert prepare_video(str(source), str(result), SMALL._replace(link=True)).how == "linked"


def test_damaged_frames_are_named(tmp_path):
    source = write_video(tmp_path / "a.avi", 40, codec="mpeg4")
    content = bytearray(source.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 3000] = bytes(3000)
    source.write_bytes(content)
    outcome = check(source)
    assert outcome.damage


def test_size_changes_on_the_way(tmp_path):
    """Two raw streams after each other: all frames have the size of the first."""
    first = write(tmp_path / "1.h264", frames=5)
    second = write(tmp_path / "2.h264", frames=7, size=(64, 128))
    source = tmp_path / "both.ts"
    source.write_bytes(first.read_bytes() + second.read_bytes())
    outcome = prepare_video(str(source), str(tmp_path / "result.mp4"), SMALL)
    assert outcome.frames == 12
    assert {frame.shape for frame in decode_all(tmp_path / "result.mp4")[0]} == {(48, 64, 3)}


def test_no_result_without_frames(tmp_path):
    source = tmp_path / "a.mp4"
    source.write_bytes(b"no video" * 100)
    with pytest.raises(DecodeError, match=r"a\.mp4: "):
        prepare_video(str(source), str(tmp_path / "out" / "a.mp4"), SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["frames", "times", "rate"])
def test_a_wrong_result_does_not_count(tmp_path, monkeypatch, wrong):
    """The encoder is made to lose a frame, or to shift one, or to run slower."""
    from slowfast_lara.prepare import reencode

    def mux(out, stream, packets, numbers, timing):
        if wrong == "frames":
            packets, numbers = packets[:-1], numbers[:-1]
        elif wrong == "times":
            timing = timing._replace(ticks=[*timing.ticks[:-1], timing.ticks[-1] + 1])
        else:
            timing = timing._replace(tick=timing.tick * 2)
        right(out, stream, packets, numbers, timing)

    right = reencode.mux
    monkeypatch.setattr(reencode, "mux", mux)
    source = write(tmp_path / "a.mp4")
    result = tmp_path / "result.mp4"
    result.write_bytes(b"before")
    with pytest.raises(DecodeError, match="the result"):
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
