from __future__ import annotations

import av
import numpy as np
import pytest

from slowfast_lara.data import decode
from slowfast_lara.data.decode import Region, count_frames, read_all, read_span
from slowfast_lara.errors import DecodeError
from tests.helpers.videos import NEEDS_REAL_VIDEOS, decode_all, real_videos, write_video

B_FRAMES = {"bf": "3", "g": "50", "b-pyramid": "normal"}
UNEVEN = np.cumsum([20, 55, 35, 20, 80] * 8).tolist()
VIDEOS = {
    "b_frames.mp4": {"options": B_FRAMES, "audio": True},
    "short_gops.mp4": {"options": {"g": "5", "bf": "0"}},
    "open_gops.mp4": {"options": {"g": "9", "bf": "2", "x264-params": "open-gop=1"}},
    "b_frames.avi": {"options": B_FRAMES},
    "mpeg4.avi": {"codec": "mpeg4", "options": {"bf": "2", "g": "12"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "vp8_hidden_frames.webm": {
        "codec": "libvpx",
        "options": {"auto-alt-ref": "1", "lag-in-frames": "16", "b": "200k"},
    },
    "variable_rate.mp4": {"pts": UNEVEN, "options": B_FRAMES},
    "variable_rate.webm": {
        "pts": UNEVEN,
        "codec": "libvpx-vp9",
        "options": {"deadline": "realtime", "cpu-used": "8"},
    },
    "late_start.mkv": {"pts": [1000 + 40 * number for number in range(40)], "options": B_FRAMES},
    "no_duration.mkv": {"container_options": {"live": "1"}, "options": B_FRAMES},
    "transport.ts": {"options": B_FRAMES},
    "no_timestamps.h264": {"options": B_FRAMES},
    "ntsc.mp4": {"fps": 29.97},
}


def whole(height: int, width: int) -> Region:
    return Region(0, 0, height, width, height, width)


@pytest.fixture(params=VIDEOS)
def video(request, tmp_path):
    return write_video(tmp_path / request.param, **VIDEOS[request.param])


def check_against_all_frames(path, read):
    frames, fps = decode_all(path)
    rng = np.random.default_rng(0)
    for _ in range(10):
        first, last = np.sort(rng.random(2))

        def choose(count, rate, first=first, last=last):
            return np.linspace(first * (count - 1), last * (count - 1), 5).astype(int)

        pixels, order = read(str(path), choose, whole)
        expected = choose(len(frames), fps)
        assert np.array_equal(pixels[order], np.stack([frames[index] for index in expected]))


@pytest.mark.parametrize("read", [read_span, read_all])
def test_frames_are_those_of_a_plain_decode(video, read):
    if read is read_span and "hidden" in video.name:
        pytest.skip("hidden packets shift a random clip by a frame; read_all must count right")
    check_against_all_frames(video, read)


@pytest.mark.parametrize(
    "codec, options", [("libx264", {"bf": "3", "g": "10"}), ("mpeg4", {"bf": "2", "g": "10"})]
)
def test_single_frames_of_avi(tmp_path, codec, options):
    """It has no times by which a frame among B-frames could be found."""
    path = write_video(tmp_path / "a.avi", 30, size=(64, 64), codec=codec, options=options)
    frames, _ = decode_all(path)
    for number, frame in enumerate(frames):
        pixels, _ = read_span(str(path), lambda count, fps, n=number: np.array([n]), whole)
        assert np.array_equal(pixels[0], frame), number


@NEEDS_REAL_VIDEOS
@pytest.mark.parametrize("path", real_videos(), ids=lambda path: path.name)
def test_frames_of_real_videos(path):
    check_against_all_frames(path, read_all)


@NEEDS_REAL_VIDEOS
@pytest.mark.parametrize("path", real_videos("*.mp4"), ids=lambda path: path.name)
def test_span_of_real_videos(path):
    check_against_all_frames(path, read_span)


def test_rate_and_count(video):
    frames, fps = decode_all(video)
    seen = []

    def choose(count, rate):
        seen.append((count, rate))
        return np.arange(count)

    pixels, order = read_all(str(video), choose, whole)
    assert len(pixels) == len(frames) and seen[-1] == (len(frames), pytest.approx(fps))
    assert count_frames(str(video)) == (len(frames), 0)


def test_a_header_that_counts_too_many(tmp_path):
    path = write_video(tmp_path / "whole.avi", codec="mpeg4")
    cut = tmp_path / "cut.avi"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    frames, _ = decode_all(cut)
    assert 0 < len(frames) < 40
    check_against_all_frames(cut, read_all)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("value", [0, 255])
def test_damaged_packets(tmp_path, suffix, value):
    """What a plain decode conceals or drops is concealed or dropped here too."""
    path = write_video(tmp_path / f"a{suffix}", options=B_FRAMES)
    with av.open(str(path)) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux() if packet.size]
    content = path.read_bytes()
    for place, size in packets[2:20:3]:
        damaged = bytearray(content)
        # Behind its first header, so that the container is whole.
        damaged[place + 16 : place + size] = bytes([value]) * (size - 16)
        path.write_bytes(damaged)
        check_against_all_frames(path, read_all)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.35, 0.5, 0.65])
def test_a_stream_that_begins_between_key_frames(tmp_path, share):
    """What comes before the first key frame is no frame, whoever wants it."""
    options = {**B_FRAMES, "g": "12", "x264-params": "open-gop=1:scenecut=0"}
    content = write_video(tmp_path / "whole.ts", options=options).read_bytes()
    cut = tmp_path / "cut.ts"
    cut.write_bytes(content[: 188 * 3] + content[int(share * len(content)) // 188 * 188 :])
    check_against_all_frames(cut, read_all)


def test_a_wrong_guess_that_misses_nothing(tmp_path, monkeypatch):
    path = write_video(tmp_path / "whole.avi", codec="mpeg4")
    frames, _ = decode_all(path)
    guessed = decode.scanned
    monkeypatch.setattr(
        decode, "scanned", lambda *args: guessed(*args)._replace(num_frames=len(frames) + 3)
    )
    decoded = []
    monkeypatch.setattr(
        decode, "_decode_all", lambda *args, f=decode._decode_all: decoded.append(1) or f(*args)
    )
    pixels, order = read_all(str(path), lambda count, fps: np.arange(count), whole)
    assert np.array_equal(pixels, frames) and order.tolist() == list(range(len(frames)))
    assert len(decoded) == 1
    pixels, order = read_all(str(path), lambda count, fps: np.arange(count)[-1:], whole)
    assert np.array_equal(pixels[order][0], frames[-1]) and len(decoded) == 3


def test_region_and_size(tmp_path):
    path = write_video(tmp_path / "a.mp4", size=(48, 64))
    frames, _ = decode_all(path)
    region = Region(8, 16, 24, 32, 24, 32)
    pixels, _ = read_all(str(path), lambda count, fps: np.array([3]), lambda *size: region)
    assert np.array_equal(pixels[0], frames[3][8:32, 16:48])


def test_a_colon_in_the_name(tmp_path):
    path = write_video(tmp_path / "plain.mp4")
    path = path.rename(tmp_path / "http:a b.mp4")
    assert count_frames(str(path)) == (40, 0)


def test_text_is_no_video(tmp_path):
    path = tmp_path / "notes.txt"  # FFmpeg would draw it
    path.write_text("a text\n" * 1000)
    with pytest.raises(DecodeError, match="notes.txt"):
        count_frames(str(path))


def test_a_playlist_is_not_followed(tmp_path):
    write_video(tmp_path / "a.ts")
    path = tmp_path / "list.m3u8"
    path.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1,\na.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(DecodeError, match="list.m3u8"):
        count_frames(str(path))
