"""Videos with smooth motion, edges and sensor noise, in sizes and codecs of real collections."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

# Height, width, codec and options by file name: landscape, portrait, nearly square, odd sizes,
# smaller and larger than a crop of 224 pixels. In 56 x 122 and 90 x 96, the longer side divides the
# shorter one times 224 without remainder.
CLIPS: dict[str, tuple[int, int, str, dict[str, str]]] = {
    "landscape.mp4": (240, 320, "libx264", {"bf": "2", "g": "12"}),
    "portrait.mp4": (480, 272, "libx264", {"crf": "30"}),
    "wide.avi": (180, 430, "mpeg4", {"g": "12"}),
    "odd.webm": (241, 255, "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "small.mkv": (56, 122, "libvpx", {"deadline": "realtime"}),
    "lossless.mkv": (225, 301, "ffv1", {}),
    "square.avi": (224, 224, "mjpeg", {}),
}
PIXEL_FORMATS = {"mjpeg": "yuvj420p", "ffv1": "yuv444p"}


def write_clip(folder: Path, name: str, frames: int = 15) -> Path:
    """Write the clip `name` of CLIPS, with 24 frames per second."""
    height, width, codec, options = CLIPS[name]
    rng = np.random.default_rng(height)
    y, x = np.mgrid[:height, :width]
    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(24), options=options)
        stream.width, stream.height = width, height
        stream.pix_fmt = PIXEL_FORMATS.get(codec, "yuv420p")
        for number in range(frames):
            waves = [np.sin((x * (c + 1) + y * (3 - c) + 9 * number) / 23) for c in range(3)]
            image = 128 + 90 * np.stack(waves, axis=-1)
            image[height // 3 : height // 2, (7 * number) % width :] = (230, 30, 120)
            image += rng.normal(scale=8, size=image.shape)
            pixels = image.clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return folder / name
