"""Videos made on the spot, and the obvious way to read them."""

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

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_VIDEOS = Path(os.environ.get("SLOWFAST_LARA_VIDEOS", REPOSITORY.parent / "shared/videos"))
NEEDS_REAL_VIDEOS = pytest.mark.skipif(
    not SHARED_VIDEOS.is_dir(), reason="no real videos (SLOWFAST_LARA_VIDEOS)"
)


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
    """Noise that changes with every frame; `pts` in milliseconds makes the rate variable."""
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
    """RGB pixels [H, W, 3], grey ones unless given."""
    image = np.full((48, 64, 3), 99, np.uint8) if pixels is None else pixels
    assert cv2.imwrite(str(path), image[..., ::-1])


def decode_all(path: Path) -> tuple[list[np.ndarray], float]:
    """Every frame and the rate, the plain way; packets that do not decode are passed over."""
    frames = []
    with av.open(str(path)) as container:
        fps = float(container.streams.video[0].average_rate)
        # Damage is concealed by what is decoded by then: with threads, not the same each time.
        container.streams.video[0].codec_context.thread_count = 1
        for packet in container.demux(video=0):
            with contextlib.suppress(av.FFmpegError):
                frames += [frame.to_ndarray(format="rgb24") for frame in packet.decode()]
    return frames, fps


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
