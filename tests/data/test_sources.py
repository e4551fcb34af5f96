"""A video file, a list of images and a folder of images give the same frames."""

from __future__ import annotations

import numpy as np
import pytest

from slowfast_lara.data import display
from slowfast_lara.data.sources import list_images, open_frames, read_frames
from slowfast_lara.errors import DecodeError
from tests.helpers.videos import decode_all, whole_frame, write_image, write_video


@pytest.fixture
def video(tmp_path):
    return str(write_video(tmp_path / "a.mp4", frames=12, fps=24))


@pytest.fixture
def folder(video, tmp_path):
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(decode_all(video)[0]):
        write_image(tmp_path / "frames" / f"{number}.png", frame)
    return str(tmp_path / "frames")


@pytest.mark.parametrize("kind", ["file", "folder", "list"])
def test_all_frames_one_by_one(video, folder, kind):
    source = {"file": video, "folder": folder, "list": list_images(folder)}[kind]
    with open_frames(source, 10) as (fps, frames):
        assert fps == (24 if kind == "file" else 10)
        starts, ends, images = zip(*frames)
        assert np.array_equal(images, decode_all(video)[0])
        np.testing.assert_allclose(starts, np.arange(12) / fps)
        np.testing.assert_allclose(ends, np.arange(1, 13) / fps)


@pytest.mark.parametrize("all_decoded", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "list"])
def test_chosen_frames(video, folder, kind, all_decoded):
    source = {"file": video, "folder": folder, "list": list_images(folder)}[kind]
    asked = []

    def choose(frames: int, fps: float) -> np.ndarray:
        asked.append((frames, fps))
        return np.array([[7, 3, 3], [0, 11, 7]])

    read = read_frames(source, choose, whole_frame, whole=all_decoded, default_fps=10)
    assert asked == [(12, 24 if kind == "file" else 10)]
    assert len(read.pixels) == 4  # no frame twice
    expected = np.stack(decode_all(video)[0])[[[7, 3, 3], [0, 11, 7]]]
    assert np.array_equal(read.pixels[read.order], expected)


def consume(source: str) -> None:
    with open_frames(source) as (_, frames):
        for _ in frames:
            pass


def test_sources_without_frames(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("not a video")
    header, packets, _ = write_video(tmp_path / "a.mkv").read_bytes().partition(b"\x1f\x43\xb6\x75")
    (tmp_path / "header.mkv").write_bytes(header + packets)
    reasons = {
        "empty": "no images",
        "text.mp4": "Invalid data",
        "absent.mp4": "No such file",
        "header.mkv": "no frame decodes",
    }
    for name, reason in reasons.items():
        with pytest.raises(DecodeError) as caught:
            consume(str(tmp_path / name))
        assert str(caught.value).startswith(f"{tmp_path / name}: {reason}")
        assert "\n" not in str(caught.value)


def test_frames_that_are_too_large(video, monkeypatch):
    monkeypatch.setattr(display, "MAX_PIXELS", 48 * 64 - 1)
    with pytest.raises(DecodeError, match="a.mp4: frames of 64x48 pixels are too large"):
        consume(video)
    with pytest.raises(DecodeError, match="a.mp4: frames of 64x48 pixels are too large"):
        read_frames(video, lambda frames, fps: np.arange(2), whole_frame, whole=True)
