"""All readers against a plain decode, for every video encoder of PyAV in every container."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.sources import FrameArray
from slowfast_lara.data.timestamps import TimestampCache
from slowfast_lara.data.video import count_frames, read_clip, read_timestamps, read_whole
from slowfast_lara.errors import DecodeError
from tests.helpers.pictures import restore_scheduling
from tests.helpers.videos import config, decode_all, set_old, streamed, whole_frame

FRAMES = 45
VARIABLE_MS = np.cumsum([20, 55, 35, 20, 80] * 9).tolist()
OPTIONS = {
    "libx264": {"bf": "3", "g": "10"},
    "libx265": {"x265-params": "keyint=10:bframes=3:log-level=none"},
    "libvpx-vp9": {"g": "10", "deadline": "realtime", "cpu-used": "8"},
    "libsvtav1": {"g": "10", "preset": "12"},
    **dict.fromkeys(("mpeg4", "mpeg2video", "mpeg1video"), {"bf": "2", "g": "10"}),
}
SIZES = {"dvvideo": (576, 720), **dict.fromkeys(("h261", "h263"), (144, 176))}
CONTAINERS = (
    *("mp4", "mov", "mkv", "avi", "ts", "mpg", "flv", "asf", "webm", "ogv", "3gp", "nut", "mxf"),
    *("ivf", "gif", "m4v", "h264", "hevc", "mjpeg", "vob", "rm", "swf", "m2v", "m1v", "dv"),
    *("wtv", "obu", "y4m"),
)
DAMAGE = {
    "avi": (
        lambda content: content.replace(b"idx1", b"JUNK"),
        lambda content: content[: content.rfind(b"idx1") + 8 + 16 * 20],  # cut index
    ),
    "ts": (lambda content: content[: 188 * 3] + content[len(content) // 564 * 188 :],),
}
# Encoders that every build of PyAV has.
COMMON = {"libx264", "mpeg4", "mpeg2video", "msmpeg4", "wmv2", "flv", "h263", "mjpeg", "ffv1"}


def video_encoders() -> dict[str, str]:
    """Names and pixel formats. Several names may mean one encoder."""
    found = {}
    for name in sorted(av.codecs_available):
        try:
            codec = av.Codec(name, "w")
        except ValueError:  # a decoder
            continue
        formats = [form.name for form in codec.video_formats or ()]
        if codec.type == "video" and formats:
            is_plain = "yuv420p" in formats and codec.name != "mjpeg"
            found[codec.name] = "yuv420p" if is_plain else formats[0]
    return found


def write(path: Path, encoder: str, pix_fmt: str, size: tuple[int, int], ms: list[int]) -> bool:
    """Write noise; False if FFmpeg cannot write this encoder to this container."""
    height, width = size
    rng = np.random.default_rng(0)
    try:
        with av.open(str(path), "w") as container:
            stream = container.add_stream(encoder, 25, options=OPTIONS.get(encoder, {"g": "10"}))
            stream.height, stream.width, stream.pix_fmt = height, width, pix_fmt
            stream.codec_context.thread_count = 1
            stream.codec_context.time_base = Fraction(1, 1000 if ms is VARIABLE_MS else 25)
            for number in range(FRAMES if height < 200 else 12):
                coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
                image = np.kron(coarse, np.ones((8, 8, 1), np.uint8))[:height, :width]
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
                frame = frame.reformat(format=pix_fmt)
                frame.time_base = Fraction(1, 1000)
                frame.pts = ms[number]
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    except (ValueError, OSError, av.FFmpegError):
        return False
    finally:
        restore_scheduling()
    return path.exists()


def files(folder: Path, encoder: str, pix_fmt: str) -> Iterator[Path]:
    """Files that decode: constant and variable rates, odd sizes, cut and missing indices."""
    height, width = SIZES.get(encoder, (96, 128))
    constant = [40 * number for number in range(FRAMES)]
    kinds = {"plain": ((height, width), constant), "odd": ((height - 5, width - 7), VARIABLE_MS)}
    kinds["variable"] = ((height, width), VARIABLE_MS)
    for suffix in CONTAINERS:
        for kind, (size, ms) in kinds.items():
            path = folder / f"{kind}.{suffix}"
            if not write(path, encoder, pix_fmt, size, ms):
                continue
            content = path.read_bytes()
            for damage in (bytes, *DAMAGE.get(suffix, ())):
                path.write_bytes(damage(content))
                try:
                    count_frames(str(path))
                except DecodeError:  # FFmpeg cannot read all that it writes
                    continue
                yield set_old(path)


def displayed(path: Path) -> list[np.ndarray]:
    """A plain decode from the start, with square pixels."""
    with av.open(str(path)) as container:
        aspect = container.streams.video[0].sample_aspect_ratio or Fraction(1)
        if aspect == 1:
            return decode_all(path)[0]
        frames = []
        for frame in container.decode(video=0):
            width, height = frame.width * min(aspect, 1), frame.height * min(1 / aspect, 1)
            size = {"width": round(width), "height": round(height), "interpolation": "BICUBIC"}
            frames.append(frame.to_ndarray(format="rgb24", **size))
        return frames


def check_readers(path: Path, cache: TimestampCache) -> None:
    frames = displayed(path)
    expected = np.stack(frames)
    assert np.array_equal(np.stack(streamed(path)), expected)
    for read in (read_clip, read_whole):
        clip = read(str(path), lambda count, fps: np.arange(count), whole_frame)
        assert np.array_equal(clip.pixels, expected)
    for number in range(0, len(frames), 4):
        wanted = np.minimum([number, number + 1, number + 9], len(frames) - 1)
        for one in (wanted[:1], wanted):
            clip = read_clip(str(path), lambda *_, n=one: n, whole_frame, cache=cache)
            assert np.array_equal(clip.pixels[clip.order], expected[one]), number
    fps = read_timestamps(str(path)).fps
    cfg = config(TEST__NUM_ENSEMBLE_VIEWS=3, TEST__NUM_SPATIAL_CROPS=3)
    views = [Kinetics.read_views(source, cfg) for source in (str(path), FrameArray(expected, fps))]
    assert bool((views[0] == views[1]).all())


@pytest.mark.slow
@pytest.mark.parametrize("encoder, pix_fmt", video_encoders().items())
def test_every_encoder_in_every_container(tmp_path, encoder, pix_fmt):
    cache, checked = TimestampCache(str(tmp_path)), 0
    for path in files(tmp_path, encoder, pix_fmt):
        check_readers(path, cache)
        checked += 1
    assert checked or encoder not in COMMON
    if not checked:
        pytest.skip("this encoder writes no file that can be read")
