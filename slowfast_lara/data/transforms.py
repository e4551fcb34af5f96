"""Crops, flips, colour changes, blur, erasing and normalisation of clips.

Clips are uint8 [T, H, W, 3] until they are normalised. Random functions draw their parameters once
per clip. Random crops take a seed, not a generator: they are called once per frame size, and every
call for a clip uses the same seed. (PySlowFast's functions are not used: random_crop returns one
value instead of two if there is nothing to crop, and contrast_jitter passes a keyword argument that
does not exist.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data.regions import Region

LUMA = np.array([0.299, 0.587, 0.114])
COLOR_JITTER = 0.4
CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
# Probabilities and blur widths are those of Motionformer and SimCLR (Chen et al. 2020).
GRAY_PROBABILITY = 0.2
BLUR_PROBABILITY = 0.5
BLUR_SIGMA = (0.1, 2.0)  # range in pixels
ERASED_AREA = (0.02, 1 / 3)  # range, as fraction of the frame area
ERASED_ASPECT = (0.3, 1 / 0.3)  # range of height / width


def whole_frame(height: int, width: int, short_side: int) -> Region:
    """The whole frame, scaled so that its shorter side is `short_side`."""
    if width < height:
        out = math.floor(height / width * short_side), short_side
    else:
        out = short_side, math.floor(width / height * short_side)
    return Region(0, 0, height, width, *out)


def test_frame(height: int, width: int, data: CfgNode) -> Region:
    """The whole frame, scaled for a test; `data` is the config node DATA."""
    short_side = data.TEST_SHORT_SIDE or data.TEST_CROP_SIZE
    if data.TEST_RESIZE == "opencv":
        return whole_frame(height, width, short_side)
    out_height, out_width = (side * short_side // min(height, width) for side in (height, width))
    return Region(0, 0, height, width, out_height, out_width, antialias=True)


def test_crop(pixels: np.ndarray, position: int, data: CfgNode) -> np.ndarray:
    """Square crop for a test (see `uniform_crop`); `data` is the config node DATA."""
    return uniform_crop(pixels, data.TEST_CROP_SIZE, position, data.TEST_RESIZE == "opencv")


def uniform_crop(pixels: np.ndarray, size: int, position: int, round_up: bool = True) -> np.ndarray:
    """Square crop of [..., H, W, 3] at the start (0), centre (1) or end (2) of the longer side.

    The crop is centred along the shorter side. `round_up` is the rounding of odd centre offsets.
    """
    height, width = pixels.shape[-3:-1]
    y, x = ((side - size + round_up) // 2 for side in (height, width))
    if height > width:
        y = (0, y, height - size)[position]
    else:
        x = (0, x, width - size)[position]
    return pixels[..., y : y + size, x : x + size, :]


def draw_short_side(
    rng: np.random.Generator, smallest: float, largest: float, inverse: bool
) -> int:
    """Draw a short side in pixels: uniform, or with a uniform reciprocal if `inverse`."""
    if inverse:
        return round(1 / rng.uniform(1 / largest, 1 / smallest))
    return round(rng.uniform(smallest, largest))


def jittered_crop(height: int, width: int, size: int, short_side: int, seed: int) -> Region:
    """Random `size` x `size` crop of the frame scaled to `short_side`.

    Cropping before scaling takes half the time of scaling the whole frame.
    """
    side = max(round(size * min(height, width) / short_side), 1)
    return _random_region(height, width, side, side, size, np.random.default_rng(seed))


def resized_crop(height: int, width: int, size: int, seed: int) -> Region:
    """Crop of random area and aspect ratio, resized to `size` x `size`.

    If ten drawn crops do not fit the frame, the crop is a square of the frame's shorter side.
    """
    rng = np.random.default_rng(seed)
    for _ in range(10):
        area = height * width * rng.uniform(*CROP_AREA)
        aspect = math.exp(rng.uniform(*np.log(CROP_ASPECT)))
        crop_height, crop_width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            return _random_region(height, width, crop_height, crop_width, size, rng)
    return _random_region(height, width, min(height, width), min(height, width), size, rng)


def _random_region(
    height: int, width: int, crop_height: int, crop_width: int, size: int, rng: np.random.Generator
) -> Region:
    top = int(rng.integers(0, height - crop_height, endpoint=True))
    left = int(rng.integers(0, width - crop_width, endpoint=True))
    return Region(top, left, crop_height, crop_width, size, size)


def random_flip(clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mirror the clip left to right with probability 1/2."""
    if rng.random() < 0.5:
        return clip
    return by_frame(clip, lambda frame, out: cv2.flip(frame, 1, dst=out))


def color_jitter(clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Change brightness, contrast and saturation by up to 40 %, in random order."""
    for change in rng.permutation([0, 1, 2]):
        factor = rng.uniform(1 - COLOR_JITTER, 1 + COLOR_JITTER)
        clip = (brightness, contrast, saturation)[change](clip, factor)
    return clip


def brightness(clip: np.ndarray, factor: float) -> np.ndarray:
    """Blend black (factor 0) and the clip (factor 1); larger factors extrapolate."""
    return look_up(clip, np.arange(256) * factor)


def contrast(clip: np.ndarray, factor: float) -> np.ndarray:
    """Blend each frame's mean luminance (factor 0) and the clip (factor 1), or extrapolate."""

    def change(frame: np.ndarray, out: np.ndarray) -> None:
        # cv2.sumElems is exact for integers and takes a tenth of the time of NumPy's mean.
        sums = np.array(cv2.sumElems(frame)[:3])
        mean = round(float(sums / (frame.shape[0] * frame.shape[1]) @ LUMA))
        out[:] = look_up(frame, (np.arange(256) - mean) * factor + mean)

    return by_frame(clip, change)


def saturation(clip: np.ndarray, factor: float) -> np.ndarray:
    """Blend grayscale (factor 0) and the clip (factor 1); larger factors extrapolate."""
    matrix = factor * np.eye(3) + (1 - factor) * np.tile(LUMA, (3, 1))
    flat = np.ascontiguousarray(clip).reshape(len(clip) * clip.shape[1], -1, 3)
    return cv2.transform(flat, matrix.astype(np.float32)).reshape(clip.shape)


def random_gray(clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Convert the clip to grayscale with probability GRAY_PROBABILITY."""
    return saturation(clip, 0) if rng.random() < GRAY_PROBABILITY else clip


def random_blur(clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Apply a Gaussian blur of random width with probability BLUR_PROBABILITY."""
    if rng.random() >= BLUR_PROBABILITY:
        return clip
    sigma = rng.uniform(*BLUR_SIGMA)
    return by_frame(clip, lambda frame, out: cv2.GaussianBlur(frame, (0, 0), sigma, dst=out))


def random_erase(clip: np.ndarray, rng: np.random.Generator, probability: float) -> np.ndarray:
    """With the given probability, fill the same rectangle of all frames with noise.

    Zhong et al., "Random Erasing Data Augmentation" (2020). The noise differs from frame to frame,
    so that the rectangle does not look like a static object.
    """
    if rng.random() >= probability:
        return clip
    frames, height, width, channels = clip.shape
    area = height * width * rng.uniform(*ERASED_AREA)
    aspect = math.exp(rng.uniform(*np.log(ERASED_ASPECT)))
    rows = min(max(round(math.sqrt(area * aspect)), 1), height)
    columns = min(max(round(math.sqrt(area / aspect)), 1), width)
    top = int(rng.integers(height - rows, endpoint=True))
    left = int(rng.integers(width - columns, endpoint=True))
    erased = clip.copy()
    noise = rng.integers(256, size=(frames, rows, columns, channels), dtype=np.uint8)
    erased[:, top : top + rows, left : left + columns] = noise
    return erased


def by_frame(clip: np.ndarray, change: Callable[[np.ndarray, np.ndarray], Any]) -> np.ndarray:
    """Call `change(frame, out)` on every frame; `change` writes the new frame to `out`."""
    result = np.empty(clip.shape, np.uint8)
    for frame, out in zip(clip, result):
        change(np.ascontiguousarray(frame), out)
    return result


def look_up(clip: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Map pixel values 0..255 by the table `values`, [256] or per channel [256, 3]."""
    table = values.round().clip(0, 255).astype(np.uint8)
    flat = np.ascontiguousarray(clip).reshape(-1, clip.shape[-2], 3)
    return cv2.LUT(flat, table.reshape(1, 256, -1)).reshape(clip.shape)


class Normalize:
    """Converts uint8 RGB [T, H, W, 3] to float32 [3, T, H, W]: (x / 255 - mean) / std.

    `data` is the config node DATA. If DATA.REVERSE_INPUT_CHANNEL is set, the result is BGR; MEAN
    and STD are in the order RGB.
    """

    def __init__(self, data: CfgNode) -> None:
        values = (np.arange(256)[:, None] / 255 - np.array(data.MEAN)) / np.array(data.STD)
        self._tables = [np.ascontiguousarray(column) for column in values.T.astype(np.float32)]
        self._channels = [2, 1, 0] if data.REVERSE_INPUT_CHANNEL else [0, 1, 2]
        self._device_tables: list[torch.Tensor] = []

    def __call__(self, clip: np.ndarray, out: np.ndarray | None = None) -> torch.Tensor:
        if out is None:
            out = np.empty((3, *clip.shape[:3]), np.float32)
        for number, frame in enumerate(clip):
            planes = cv2.split(np.ascontiguousarray(frame))
            for target, channel in zip(out, self._channels):
                cv2.LUT(planes[channel], self._tables[channel], dst=target[number])
        return torch.from_numpy(out)

    def batch(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise a batch [B, T, H, W, 3] on any device; bitwise equal to `__call__` per clip."""
        tables = self._device_tables
        if not tables or tables[0].device != pixels.device:
            # Only once: a copy from memory that is not pinned blocks the host.
            tables = [torch.from_numpy(table).to(pixels.device) for table in self._tables]
            self._device_tables = tables
        planes = [tables[channel][pixels[..., channel].int()] for channel in self._channels]
        return torch.stack(planes, dim=1)


def pixels_of(view: torch.Tensor, cfg: CfgNode) -> np.ndarray:
    """Undo `Normalize`: a view [3, T, H, W] becomes RGB frames, uint8 [T, H, W, 3]."""
    data = cfg.DATA
    channels = view.permute(1, 2, 3, 0).numpy()
    if data.REVERSE_INPUT_CHANNEL:
        channels = channels[..., ::-1]
    colours = channels * np.array(data.STD) + np.array(data.MEAN)
    return (colours * 255).round().clip(0, 255).astype(np.uint8)
