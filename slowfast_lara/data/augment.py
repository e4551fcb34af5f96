"""Random grayscale, blur and erasing of training clips.

Clips are uint8 [T, H, W, 3]. Each random choice is made once per clip, for all frames.
Probabilities and blur widths are those of Motionformer and SimCLR (Chen et al. 2020).
"""

from __future__ import annotations

import math

import cv2
import numpy as np

from slowfast_lara.data.transforms import by_frame, saturation

GRAY_PROBABILITY = 0.2
BLUR_PROBABILITY = 0.5
BLUR_SIGMA = (0.1, 2.0)  # range in pixels
ERASED_AREA = (0.02, 1 / 3)  # range, as fraction of the frame area
ERASED_ASPECT = (0.3, 1 / 0.3)  # range of height / width


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
