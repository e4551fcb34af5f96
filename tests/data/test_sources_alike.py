"""Training, testing, streaming and preparation read the same frames from every kind of video."""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import pytest

from slowfast_lara.data import load_views
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.timestamps import TimestampCache
from slowfast_lara.data.transforms import pixels_of
from slowfast_lara.data.video import count_frames, read_clip, read_whole
from slowfast_lara.prepare.reencode import Options, prepare_video
from tests.helpers.pictures import upright, write_pictures, write_with_cover
from tests.helpers.videos import config, decode_all, streamed, whole_frame

FRAMES = 35
KINDS = {
    "plain.mp4": {},
    "rotated_90.mp4": {"turn": 90},
    "rotated_180.mp4": {"turn": 180},
    "rotated_270.mov": {"turn": 270},
    "mirrored.mp4": {"turn": 90, "mirror": True},
    "variable_rate.mp4": {"milliseconds": np.cumsum([20, 70, 35, 50, 25] * 7).tolist()},
    "ten_bit.mp4": {"codec": "libx264", "pix_fmt": "yuv420p10le"},
    "odd.mp4": {"codec": "libx264", "pix_fmt": "yuv444p", "size": (97, 75)},
    "odd.mkv": {"codec": "ffv1", "size": (95, 131)},
    "interlaced.mp4": {"options": {"x264-params": "tff=1"}},
    "interlaced.ts": {"codec": "mpeg2video", "options": {"flags": "+ildct+ilme"}},
    "edit_list.mp4": {"options": {"g": "8", "bf": "2"}},
    "hevc.mp4": {"codec": "libx265", "rate": Fraction(30000, 1001)},
    "hevc_ten_bit.mkv": {"codec": "libx265", "pix_fmt": "yuv420p10le"},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"deadline": "realtime"}},
    "av1.mp4": {"codec": "libsvtav1", "options": {"preset": "12"}},
    "long_gop.mp4": {"options": {"g": "300"}},
}


def hide_frames(path: Path) -> None:
    """Change the edit list to omit the first ten frames."""
    content = bytearray(path.read_bytes())
    offset = content.index(b"elst") + 4
    _, _, length, start = struct.unpack(">IIIi", content[offset : offset + 16])
    struct.pack_into(">Ii", content, offset + 8, length - 400, start + 10 * 512)
    path.write_bytes(content)


@pytest.fixture(params=KINDS)
def video(request, tmp_path):
    """The file, and its upright frames."""
    options = dict(KINDS[request.param])
    codec, pix_fmt = options.pop("codec", "libx264"), options.pop("pix_fmt", "yuv420p")
    path = write_pictures(tmp_path / request.param, codec, pix_fmt, frames=FRAMES, **options)
    if "edit_list" in path.name:
        hide_frames(path)
    os.utime(path, (1e9, 1e9))  # files changed just now are not cached
    turn = upright(options.get("turn", 0), options.get("mirror", False))
    frames = [turn(frame) for frame in decode_all(path)[0]]
    assert len(frames) == (FRAMES - 10 if "edit_list" in path.name else FRAMES)
    return path, frames


def close(some: np.ndarray, others: np.ndarray) -> bool:
    return some.shape == others.shape and np.abs(some.astype(float) - others).mean() < 5


def test_all_readers_agree(video, tmp_path):
    path, frames = video
    assert count_frames(str(path)) == (len(frames), 0)
    expected = np.stack(frames)
    # Streaming, and training: from the second time on with cached timestamps.
    assert np.array_equal(np.stack(streamed(path)), expected)
    cache = TimestampCache(str(tmp_path))
    for _ in range(2):
        clip = read_clip(str(path), lambda count, fps: np.arange(count), whole_frame, cache=cache)
        assert np.array_equal(clip.pixels, expected)
        for number in range(0, len(frames), 4):
            clip = read_clip(
                str(path), lambda *_, n=number: np.array([n]), whole_frame, cache=cache
            )
            assert np.array_equal(clip.pixels[0], frames[number])
    # Testing and prediction of a video: the middle crop of the first and the last frame.
    last = {"DATA__NUM_FRAMES": len(frames), "DATA__SAMPLING_RATE": 1, "DATA__TARGET_FPS": 1}
    cfg = config(**last, TEST__NUM_ENSEMBLE_VIEWS=1, TEST__NUM_SPATIAL_CROPS=1)
    (tmp_path / "val.csv").write_text(f"{path} 0\n")
    cfg.DATA.PATH_TO_DATA_DIR = str(tmp_path)
    view = pixels_of(load_views(path, cfg)[0], cfg)
    for number in (0, -1):
        assert close(view[number], middle(frames[number]))
    assert np.array_equal(pixels_of(Kinetics(cfg, "val")[0].clip, cfg), view)
    # Preparation.
    result = tmp_path / "result.mp4"
    outcome = prepare_video(str(path), str(result), Options(short_side=64, crf=10))
    assert outcome.frames == len(frames) == count_frames(str(result))[0]
    for new, old in zip(decode_all(result)[0], frames):
        assert close(new, cv2.resize(old, new.shape[1::-1], interpolation=cv2.INTER_AREA))


def middle(frame: np.ndarray) -> np.ndarray:
    """The central square of the frame scaled to a short side of 32."""
    height, width = frame.shape[:2]
    scale = 32 / min(height, width)
    size = (max(int(width * scale), 32), max(int(height * scale), 32))
    small = cv2.resize(frame, size, interpolation=cv2.INTER_LINEAR)
    top, left = (small.shape[0] - 31) // 2, (small.shape[1] - 31) // 2
    return small[top : top + 32, left : left + 32]


@pytest.mark.parametrize("turn", [0, 90])
@pytest.mark.parametrize(
    "name, codec, sample_aspect, size",
    [
        ("wide.mp4", "libx264", (4, 3), (72, 128)),
        ("tall.mkv", "libx264", (8, 9), (96, 114)),
        ("wide.ts", "mpeg2video", (4, 3), (72, 128)),
        ("tall.avi", "mpeg4", (10, 11), (96, 116)),
        ("absurd.mp4", "libx264", (1, 100), (96, 128)),
    ],
)
def test_non_square_pixels(tmp_path, name, codec, sample_aspect, size, turn):
    """All readers give square pixels; the picture of a prepared video has the same proportions."""
    if turn and not name.endswith("mp4"):
        pytest.skip("only mp4 stores a display matrix")
    path = write_pictures(
        tmp_path / name, codec, frames=9, pixel_aspect=Fraction(*sample_aspect), turn=turn
    )
    turned = upright(turn, False)
    expected = [
        turned(cv2.resize(frame, size[::-1], interpolation=cv2.INTER_AREA))
        for frame in decode_all(path)[0]
    ]
    frames = np.stack(streamed(path))
    assert close(frames, np.stack(expected))
    for read in (read_clip, read_whole):
        pixels = read(str(path), lambda count, fps: np.arange(count), whole_frame).pixels
        assert np.array_equal(pixels, frames)
    cfg = config(TEST__NUM_ENSEMBLE_VIEWS=1, TEST__NUM_SPATIAL_CROPS=3)
    result = tmp_path / "result.mp4"
    prepare_video(str(path), str(result), Options(short_side=64, crf=10))
    views = [pixels_of(view, cfg) for view in load_views(path, cfg)]
    prepared = [pixels_of(view, cfg) for view in load_views(result, cfg)]
    assert all(close(*pair) for pair in zip(views, prepared, strict=True))


def test_side_data_of_an_unknown_type(tmp_path):
    """TIFF frames have EXIF side data, a type that PyAV 18 does not define."""
    path = write_pictures(tmp_path / "a.mov", "tiff", "rgb24", frames=5)
    assert np.array_equal(np.stack(streamed(path)), np.stack(decode_all(path)[0]))


def test_a_cover_picture_is_not_the_video(tmp_path):
    path = write_with_cover(tmp_path / "a.mp4", frames=20)
    assert [frame.shape for frame in streamed(path)] == [(96, 128, 3)] * 20
    assert count_frames(str(path)) == (20, 0)
    assert prepare_video(str(path), str(tmp_path / "b.mp4"), Options(64)).frames == 20
