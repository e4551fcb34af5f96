"""Videos that were cut short are named; whole ones of every kind are not."""

from __future__ import annotations

import errno

import av
import numpy as np
import pytest

from slowfast_lara.errors import DecodeError
from slowfast_lara.prepare import missing as module
from slowfast_lara.prepare.missing import missing
from slowfast_lara.prepare.reencode import Options, prepare_video
from tests.helpers.videos import NEEDS_REAL_VIDEOS, VIDEOS, real_videos, write_video

QUICK = Options(short_side=32, preset="ultrafast")


@pytest.mark.parametrize("name", VIDEOS)
def test_whole_videos(tmp_path, name):
    assert missing(str(write_video(tmp_path / name, **VIDEOS[name]))) == ""


@NEEDS_REAL_VIDEOS
@pytest.mark.parametrize("path", real_videos(), ids=lambda path: path.name)
def test_whole_real_videos(path):
    assert missing(str(path)) == ""


def test_sound_that_is_longer(tmp_path):
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("aac", rate=44100, layout="mono")
        for _ in range(30):
            image = np.zeros((48, 64, 3), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
        silence = np.zeros((1, 44100 * 5), np.float32)
        frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(sound.encode(frame))
        container.mux(sound.encode())
    assert missing(str(path)) == ""


def cut(path, share: float = 0.5) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return str(path)


def test_mp4_cut_at_the_border_of_a_packet(tmp_path):
    path = write_video(tmp_path / "a.mp4", 60, container_options={"movflags": "faststart"})
    with av.open(str(path)) as container:
        places = [packet.pos for packet in container.demux(video=0) if packet.size]
    path.write_bytes(path.read_bytes()[: places[30]])
    assert missing(str(path)) == "30 of 60 frames are there"
    outcome = prepare_video(str(path), str(tmp_path / "out.mp4"), QUICK)
    assert outcome.frames == 30 and outcome.damage == "30 of 60 frames are there"
    linked = prepare_video(str(path), str(tmp_path / "link.mp4"), Options(link=True))
    assert linked.how == "encoded" and linked.damage


@pytest.mark.parametrize(
    "name, options, told",
    [
        ("a.mkv", {}, "of 2.0 seconds are there"),
        ("a.flv", {}, "of 2.1 seconds are there"),
        ("a.webm", {"codec": "libvpx"}, "of 2.0 seconds are there"),
        ("a.avi", {"codec": "mpeg4"}, "of 60 frames are there"),
    ],
)
def test_other_videos_cut_in_half(tmp_path, name, options, told):
    path = write_video(tmp_path / name, 60, **options)
    assert told in missing(cut(path))
    assert told in prepare_video(str(path), str(tmp_path / "out.mp4"), QUICK).damage


@pytest.mark.parametrize("options", [QUICK, Options()])
def test_a_disk_that_fails_to_read(tmp_path, monkeypatch, options):
    path = cut(write_video(tmp_path / "a.mkv", 60))

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "open", fail, raising=False)
    with pytest.raises(DecodeError, match="a.mkv: Input/output error"):
        prepare_video(path, str(tmp_path / "out.mp4"), options)
    assert not (tmp_path / "out.mp4").exists()


def test_what_ends_the_reading_is_told(tmp_path, monkeypatch):
    def demux(container, stream=None, errors=None):
        errors.append(av.InvalidDataError(1, "Invalid data"))
        return iter(container.demux(stream))

    monkeypatch.setattr(module, "demux", demux)
    path = write_video(tmp_path / "a.mp4")
    assert missing(str(path)) == "it ends with: Invalid data"
