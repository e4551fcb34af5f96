"""Random changes of training clips: grey, blurred, partly erased.

Clips are uint8 [T, H, W, 3]; all frames of a clip are changed alike, by draws of the sample's
own generator. How often a clip is grey or blurred, and how much, are Motionformer's figures,
which are those of SimCLR (Chen et al. 2020).
"""

from __future__ import annotations

import math

import cv2
import numpy as np

from slowfast_lara.data.transforms import saturation

GREY_SHARE = 0.2
BLUR_SHARE = 0.5
BLUR_SIGMA = (0.1, 2.0)  # pixels
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)


def random_grey(clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Without colours, or as it is."""
    return saturation(clip, 0) if rng.random() < GREY_SHARE else clip


def random_blur(clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Smoothed in space by a Gaussian of random width, or as it is."""
    if rng.random() >= BLUR_SHARE:
        return clip
    sigma = rng.uniform(*BLUR_SIGMA)
    out = np.empty(clip.shape, np.uint8)
    for frame, target in zip(clip, out):
        cv2.GaussianBlur(np.ascontiguousarray(frame), (0, 0), sigma, dst=target)
    return out


def random_erase(clip: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """With a rectangle of random pixels through all frames, in this share of the clips.

    Zhong et al., "Random Erasing Data Augmentation" (2020); every frame has other pixels, so that
    the rectangle is no object that stands still.
    """
    if rng.random() >= share:
        return clip
    frames, height, width, channels = clip.shape
    top, left, rows, columns = _rectangle(height, width, rng)
    erased = clip.copy()
    noise = rng.integers(256, size=(frames, rows, columns, channels), dtype=np.uint8)
    erased[:, top : top + rows, left : left + columns] = noise
    return erased


def _rectangle(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Top, left, height and width of a rectangle of random area and aspect, within the frame."""
    area = height * width * rng.uniform(*ERASED_AREA)
    aspect = math.exp(rng.uniform(*np.log(ERASED_ASPECT)))
    # What is too long for the frame is cut off.
    rows = min(max(round(math.sqrt(area * aspect)), 1), height)
    columns = min(max(round(math.sqrt(area / aspect)), 1), width)
    top = int(rng.integers(height - rows, endpoint=True))
    left = int(rng.integers(width - columns, endpoint=True))
    return top, left, rows, columns
