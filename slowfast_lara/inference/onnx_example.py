"""Classify a video with an exported model and print the top 5 classes: python example.py VIDEO

This script reads model.onnx and config.json from its own folder. It needs only numpy, PyAV and
onnxruntime.
"""

import json
import sys
from itertools import islice
from pathlib import Path

import av
import numpy as np
import onnxruntime

FOLDER = Path(__file__).resolve().parent


def read_clip(video, spec):
    """Read one clip of a video, centre crop: float32 [1, 3, frames, size, size].

    The clip is the start of the video or, for Ssv2 models, frames from the whole video.
    """
    frames = spec["shape"][2]
    span = frames * spec["sampling_rate"] * frame_rate(video, spec["fps"]) / spec["fps"]
    whole = spec["dataset"].lower() == "ssv2"
    with av.open(video) as container:
        stream = video_stream(container)
        decoded = islice(container.decode(stream), None if whole else int(span) + 1)
        images = [display(frame, stream.sample_aspect_ratio) for frame in decoded]
    if whole:  # the middle frame of each of `frames` equal segments of the video
        indices = (np.arange(frames) + 0.5) * len(images) / frames
    else:
        indices = np.linspace(0, span - 1, frames)
    clip = [crop(images[i], spec) for i in indices.clip(0, len(images) - 1).astype(int)]
    pixels = (np.stack(clip) / 255 - spec["mean"]) / spec["std"]
    if spec["channels"] == "BGR":
        pixels = pixels[..., ::-1]
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)[None], np.float32)


def video_stream(container):
    """The first video stream that is not a cover picture."""
    cover = av.stream.Disposition.attached_pic
    return next(stream for stream in container.streams.video if not stream.disposition & cover)


def frame_rate(video, default):
    """Frames per second as FFmpeg reports it or, if that is implausible, from the timestamps.

    Returns `default` if there are no timestamps, or if they do not increase.
    """
    with av.open(video) as container:
        stream = video_stream(container)
        rate = float(stream.average_rate or 0)
        if 1 <= rate <= 240:
            return rate
        packets = [packet for packet in container.demux(stream) if packet.size]
        times = sorted({packet.pts for packet in packets} - {None})
        if len(times) < len(packets):
            times = [packet.dts for packet in packets]
        known = [(number, time) for number, time in enumerate(times) if time is not None]
        if not known:
            return default
        (first, start), (last, end) = known[0], known[-1]
        return (last - first) / float((end - start) * stream.time_base) if end > start else default


def display(frame, sample_aspect):
    """The RGB pixels of a frame as a player shows them: square pixels, rotated, mirrored."""
    aspect = sample_aspect if sample_aspect and 1 / 4 <= sample_aspect <= 4 else 1
    width, height = round(frame.width * min(aspect, 1)), round(frame.height * min(1 / aspect, 1))
    scaled = (width, height) != (frame.width, frame.height)
    options = {"width": width, "height": height, "interpolation": "BICUBIC"} if scaled else {}
    pixels = frame.to_ndarray(format="rgb24", **options)
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV does not define the type of some side data, e.g. EXIF
        return np.rot90(pixels, round(frame.rotation / 90) % 4)
    if matrix is None:
        return pixels
    # The matrix maps pixel (x, y) to position (a x + c y, b x + d y); y points downwards.
    a, b, _, c, d = map(int, np.frombuffer(bytes(matrix), np.int32)[:5])
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def crop(image, spec):
    """Scale an image bilinearly to the short side of `spec`, and crop the centre."""
    height, width = image.shape[:2]
    rows, columns = (side * spec["short_side"] // min(height, width) for side in (height, width))
    antialias = spec["resize"] == "pillow"
    y, x = (
        weights(old, new, antialias)[centre(new, spec["shape"][3], round_up=not antialias)]
        for old, new in ((height, rows), (width, columns))
    )
    across = np.einsum("xw,hwc->hxc", x, image, optimize=True)
    if antialias:
        across = rounded(across)  # Pillow stores the horizontally scaled image with 8 bits
    return rounded(np.einsum("yh,hxc->yxc", y, across, optimize=True))


def centre(length, size, round_up):
    """The middle `size` of `length` pixels."""
    start = (length - size + round_up) // 2
    return slice(start, start + size)


def weights(length, scaled_length, antialias):
    """Matrix [scaled_length, length] that scales a row of pixels bilinearly."""
    scale = length / scaled_length
    positions = (np.arange(scaled_length) + 0.5)[:, None] * scale - 0.5
    width = max(scale, 1) if antialias else 1
    if not antialias:
        positions = positions.clip(0, length - 1)
    values = (1 - abs(np.arange(length) - positions) / width).clip(0)
    values /= values.sum(axis=1, keepdims=True)
    # Pillow rounds the filter weights to 22 fractional bits.
    return rounded(values * 2**22) / 2**22 if antialias else values


def rounded(pixels):
    return np.floor(pixels + 0.5)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python example.py VIDEO")
    model = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    session = onnxruntime.InferenceSession(FOLDER / "model.onnx")
    (scores,) = session.run(None, {"clip": read_clip(sys.argv[1], model["input"])})
    # One group of scores per classifier; models of verbs and nouns have two classifiers.
    names = iter(model["class_names"])
    for part in np.split(scores[0], np.cumsum(model["class_counts"])[:-1]):
        part_names = list(islice(names, len(part)))
        for label in np.argsort(-part, kind="stable")[:5]:
            print(f"{part[label]:.6f}  {part_names[label]}")
