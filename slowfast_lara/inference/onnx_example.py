"""The likeliest classes of a video, by an exported model: python example.py VIDEO

It lies beside model.onnx and config.json, and needs numpy, PyAV and onnxruntime alone.
"""

import json
import sys
from itertools import islice
from pathlib import Path

import av
import numpy as np
import onnxruntime

FOLDER = Path(__file__).resolve().parent


def read_clip(video, given):
    """The first clip of a video, centre crop: float32 [1, 3, frames, size, size]."""
    _, _, frames, size, _ = given["shape"]
    with av.open(video) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or given["fps"])
        span = frames * given["sampling_rate"] * rate / given["fps"]
        whole = given["dataset"].lower() == "ssv2"
        decoded = islice(container.decode(stream), None if whole else int(span) + 1)
        images = [upright(frame) for frame in decoded]
    if whole:  # the middles of equal segments of the video
        wanted = (np.arange(frames) + 0.5) * len(images) / frames
    else:
        wanted = np.linspace(0, span - 1, frames)
    clip = [crop(images[i], size) for i in wanted.clip(0, len(images) - 1).astype(int)]
    pixels = (np.stack(clip) / 255 - given["mean"]) / given["std"]
    if given["channels"] == "BGR":
        pixels = pixels[..., ::-1]
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)[None], np.float32)


def upright(frame):
    """RGB pixels, turned as the video says; telephones write sideways."""
    return np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)


def crop(image, size):
    """The middle of an image, whose shorter side is scaled to `size`, bilinearly."""
    height, width = image.shape[:2]
    short = min(height, width)
    rows, columns = height * size // short, width * size // short
    top, left = -((size - rows) // 2), -((size - columns) // 2)
    y, x = places(height, rows)[top : top + size], places(width, columns)[left : left + size]
    above, before = y.astype(int), x.astype(int)
    below, after = np.minimum(above + 1, height - 1), np.minimum(before + 1, width - 1)
    y, x = (y - above)[:, None, None], (x - before)[:, None]
    upper = image[above][:, before] * (1 - x) + image[above][:, after] * x
    lower = image[below][:, before] * (1 - x) + image[below][:, after] * x
    return np.rint(upper * (1 - y) + lower * y)


def places(length, wanted):
    """Where the middles of `wanted` pixels are among those of `length`."""
    return ((np.arange(wanted) + 0.5) * length / wanted - 0.5).clip(0, length - 1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python example.py VIDEO")
    model = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    session = onnxruntime.InferenceSession(FOLDER / "model.onnx")
    (scores,) = session.run(None, {"clip": read_clip(sys.argv[1], model["input"])})
    for label in np.argsort(-scores[0], kind="stable")[:5]:
        print(f"{scores[0][label]:.6f}  {model['class_names'][label]}")
