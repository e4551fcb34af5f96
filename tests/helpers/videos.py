"""Synthetic test videos, and reference readers that decode them frame by frame."""

from __future__ import annotations

import contextlib
import os
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from slowfast_lara.config import get_cfg
from slowfast_lara.data.regions import Region
from slowfast_lara.data.sources import open_frames

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_VIDEOS = Path(os.environ.get("SLOWFAST_LARA_VIDEOS", REPOSITORY.parent / "shared/videos"))
NEEDS_REAL_VIDEOS = pytest.mark.skipif(
    not SHARED_VIDEOS.is_dir(), reason="no real videos (SLOWFAST_LARA_VIDEOS)"
)

B_FRAMES = {"bf": "3", "g": "50", "b-pyramid": "normal"}
VARIABLE_PTS = np.cumsum([20, 55, 35, 20, 80] * 8).tolist()
FAST_VP9 = {"deadline": "realtime", "cpu-used": "8"}
# Arguments of `write_video` by file name: containers, codecs and timestamps of all kinds.
VIDEOS: dict[str, dict] = {
    "b_frames.mp4": {"options": B_FRAMES, "audio": True},
    "short_gops.mp4": {"options": {"g": "5", "bf": "0"}},
    "open_gops.mp4": {"options": {"g": "9", "bf": "2", "x264-params": "open-gop=1"}},
    "b_frames.avi": {"options": B_FRAMES},
    "mpeg4.avi": {"codec": "mpeg4", "options": {"bf": "2", "g": "12"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": FAST_VP9},
    "vp8.webm": {"codec": "libvpx", "options": {"deadline": "realtime", "g": "12"}},
    "variable_rate.mp4": {"pts": VARIABLE_PTS, "options": B_FRAMES},
    "variable_rate.webm": {"pts": VARIABLE_PTS, "codec": "libvpx-vp9", "options": FAST_VP9},
    "late_start.mkv": {"pts": [1000 + 40 * number for number in range(40)], "options": B_FRAMES},
    "no_duration.mkv": {"container_options": {"live": "1"}, "options": B_FRAMES},
    "transport.ts": {"options": B_FRAMES},
    "no_timestamps.h264": {"options": B_FRAMES},
    "ntsc.mp4": {"fps": 29.97},
}


def real_videos(pattern: str = "*.*") -> list[Path]:
    return sorted(path for path in SHARED_VIDEOS.glob(pattern) if path.suffix in (".mp4", ".avi"))


def write_video(
    path: Path,
    frames: int = 40,
    *,
    size: tuple[int, int] = (48, 64),
    fps: float = 30,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    pts: list[int] | None = None,
    container_options: dict[str, str] | None = None,
    audio: bool = False,
) -> Path:
    """Write noise that changes with every frame; `pts` in milliseconds make the rate variable."""
    height, width = size
    rng = np.random.default_rng(frames)
    with av.open(str(path), "w", options=container_options or {}) as container:
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        sound = container.add_stream("aac", rate=44100, layout="mono") if audio else None
        if pts is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            coarse = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
            image = np.kron(coarse, np.ones((8, 8, 1), np.uint8))
            image[:8, :] = number * 255 // max(frames - 1, 1)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if pts is not None:
                frame.pts, frame.time_base = pts[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio:
            write_silence(container, sound)
    return path


def write_silence(container, stream) -> None:
    silence = np.zeros((1, 1024 * 8), np.float32)
    frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
    frame.sample_rate = 44100
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def write_image(path: Path, pixels: np.ndarray | None = None) -> None:
    """Write RGB pixels [H, W, 3]; gray by default."""
    image = np.full((48, 64, 3), 99, np.uint8) if pixels is None else pixels
    assert cv2.imwrite(str(path), image[..., ::-1])


def decode_all(path: Path) -> tuple[list[np.ndarray], float]:
    """All frames and the frame rate; packets that do not decode are skipped."""
    frames = []
    with av.open(str(path)) as container:
        fps = float(container.streams.video[0].average_rate or 0)
        # Error concealment uses the frames decoded before: with threads, it is not deterministic.
        container.streams.video[0].codec_context.thread_count = 1
        for packet in container.demux(video=0):
            with contextlib.suppress(av.FFmpegError):
                frames += [frame.to_ndarray(format="rgb24") for frame in packet.decode()]
    return frames, fps


def streamed(path: Path) -> list[np.ndarray]:
    """All frames as a stream reads them."""
    with open_frames(str(path)) as (_, frames):
        return [frame.pixels for frame in frames]


def whole_frame(height: int, width: int) -> Region:
    """The whole frame without scaling."""
    return Region(0, 0, height, width, height, width)


def check_frames(path: Path, read) -> None:
    """Compare random frames of a reader (`read_clip`, `read_whole`) with `decode_all`."""
    frames, fps = decode_all(path)
    rng = np.random.default_rng(0)
    for _ in range(10):
        first, last = np.sort(rng.random(2))

        def choose(count, rate, first=first, last=last):
            return np.linspace(first * (count - 1), last * (count - 1), 5).astype(int)

        pixels, order = read(str(path), choose, whole_frame)
        expected = choose(len(frames), fps)
        assert np.array_equal(pixels[order], np.stack([frames[index] for index in expected]))


def set_old(path: Path) -> Path:
    """Set the modification time an hour back: files changed just now are not cached."""
    an_hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    return path


def config(**keys):
    """A config for small clips; keys as DATA__NUM_FRAMES=8."""
    cfg = get_cfg()
    cfg.TRAIN.DATASET = cfg.TEST.DATASET = "Kinetics"
    cfg.MODEL.NUM_CLASSES = 12
    cfg.DATA_LOADER.NUM_WORKERS = 0
    data = cfg.DATA
    data.NUM_FRAMES, data.SAMPLING_RATE = 8, 2
    data.TRAIN_CROP_SIZE = data.TEST_CROP_SIZE = 32
    data.TRAIN_JITTER_SCALES = [32, 40]
    for key, value in keys.items():
        node, name = cfg, key
        while "__" in name:
            head, _, name = name.partition("__")
            node = node[head]
        node[name] = value
    return cfg


def write_malformed(folder: Path) -> list[str]:
    """Write about 200 malformed inputs; returns their paths."""
    paths = []

    def save(name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        paths.append(str(folder / name))

    rng = np.random.default_rng(0)
    kinds = {
        "mp4": {"options": {"bf": "2"}, "audio": True},
        "avi": {"codec": "mpeg4"},
        "webm": {"codec": "libvpx-vp9", "options": {"deadline": "realtime"}},
        "ts": {"codec": "mpeg2video"},
        "mkv": {},
    }
    for suffix, options in kinds.items():
        whole = write_video(folder / f"whole.{suffix}", 30, **options).read_bytes()
        for tenth in range(10):
            save(f"cut{tenth}.{suffix}", whole[: len(whole) * tenth // 10])
        for number in range(28):
            content = bytearray(whole)
            for offset in rng.integers(0, len(whole), 1 + 3 * number):
                content[offset] ^= 1 << rng.integers(8)
            save(f"flipped{number}.{suffix}", bytes(content))
    save("zeros.mp4", bytes(10_000))
    save("noise.mp4", rng.bytes(10_000))
    for name in ("text.mp4", "text.txt", "text.avi"):
        save(name, b"This is not a video.\n" * 500)
    for name in ("list.m3u8", "list.mp4"):
        save(name, b"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1,\nhttp://192.0.2.1/a.ts\n")
    save("concat.mp4", b"ffconcat version 1.0\nfile whole.mp4\n")
    with av.open(str(folder / "audio.mp4"), "w") as container:
        write_silence(container, container.add_stream("aac", rate=44100, layout="mono"))
    (folder / "folder.mp4").mkdir()
    (folder / "dangling.mp4").symlink_to(folder / "absent")
    (folder / "circle.mp4").symlink_to(folder / "circle.mp4")
    os.mkfifo(folder / "fifo.mp4")
    names = ("audio.mp4", "folder.mp4", "dangling.mp4", "circle.mp4", "fifo.mp4", "absent.mp4")
    return paths + [str(folder / name) for name in names] + ["", "/dev/zero", "/dev/null"]
