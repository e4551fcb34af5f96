"""Grayscale, blur and erasing against their definitions and probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slowfast_lara.data.transforms import ERASED_AREA, random_blur, random_erase, random_gray

SIZES = [(33, 24), (8, 9), (1, 1), (2, 40)]


class Draws:
    """Generator stub: `random` and `uniform` return the given numbers in turn."""

    def __init__(self, *numbers):
        self._numbers = iter(numbers)

    def random(self):
        return next(self._numbers)

    def uniform(self, low, high):
        return next(self._numbers)


def clip_of(height, width, frames=3):
    return np.random.default_rng(height).integers(256, size=(frames, height, width, 3)).astype("u1")


@pytest.mark.parametrize("height, width", SIZES)
def test_gray_is_the_luminance(height, width):
    clip = clip_of(height, width)
    luminance = clip.astype(np.float64) @ [0.299, 0.587, 0.114]
    gray = random_gray(clip, Draws(0.0))
    assert gray.dtype == np.uint8 and (gray == gray[..., :1]).all()
    # OpenCV rounds the weights to 1/1024: half a level of rounding, and 255 * 3 / 2048.
    assert np.abs(gray[..., 0] - luminance).max() <= 0.9


def blurred(frame, sigma):
    """Reference Gaussian blur, cut at three standard deviations, with reflected borders."""
    radius = (round(6 * sigma + 1) | 1) // 2
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        padding = [(0, 0)] * 3
        padding[axis] = (radius, radius)
        padded = np.pad(frame, padding, mode="reflect")
        size = frame.shape[axis]
        parts = [np.take(padded, range(i, i + size), axis) for i in range(2 * radius + 1)]
        frame = sum(weight * part for weight, part in zip(weights, parts))
    return frame


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.3, 2.0])
@pytest.mark.parametrize("height, width", [(33, 24), (8, 9)])
def test_blur_is_the_gaussian(height, width, sigma):
    clip = clip_of(height, width)
    found = random_blur(clip, Draws(0.0, sigma))
    expected = np.stack([blurred(frame.astype(np.float64), sigma) for frame in clip])
    # OpenCV rounds the weights to 1/256.
    assert np.abs(found - expected).max() <= 2
    assert found.dtype == np.uint8 and found.shape == clip.shape


@pytest.mark.parametrize("height, width", SIZES)
def test_erased_is_one_rectangle_in_all_frames(height, width):
    clip = clip_of(height, width)
    before = clip.copy()
    for seed in range(40):
        erased = random_erase(clip, np.random.default_rng(seed), 1.0)
        changed = (erased != clip).any(axis=(0, 3))
        rows, columns = changed.any(1).nonzero()[0], changed.any(0).nonzero()[0]
        if not len(rows):  # noise may equal the only pixel
            assert height * width == 1
            continue
        inside = erased[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        # Noise equals the old pixel only by chance.
        assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.9
        assert inside.size <= max(1, math.ceil(height * width / 3) + max(height, width)) * 9
    assert np.array_equal(clip, before)  # the input may be shared


def test_erased_pixels_are_uniform_and_differ_from_frame_to_frame():
    """1,000 black clips: the mean of the noise within four standard errors."""
    black = np.zeros((2, 16, 16, 3), np.uint8)
    values, areas = [], []
    for seed in range(1000):
        erased = random_erase(black, np.random.default_rng(seed), 1.0)
        values.append(erased[erased > 0])
        areas.append((erased[0] > 0).any(-1).mean())
        if areas[-1] > 0.05:
            assert not np.array_equal(erased[0], erased[1])
    drawn = np.concatenate(values).astype(float)  # uniform on 1..255
    error = math.sqrt((255**2 - 1) / 12 / len(drawn))
    assert drawn.mean() == pytest.approx(128, abs=4 * error)
    low, high = ERASED_AREA
    assert low * 0.6 < min(areas) and max(areas) < high * 1.15
    # Areas are uniform, except that rectangles longer than the frame are cut.
    assert np.mean(areas) == pytest.approx((low + high) / 2, abs=0.015)


@pytest.mark.parametrize(
    "change, share",
    [
        (random_gray, 0.2),
        (random_blur, 0.5),
        (lambda clip, rng: random_erase(clip, rng, 0.3), 0.3),
        (lambda clip, rng: random_erase(clip, rng, 0.0), 0.0),
    ],
)
def test_probabilities(change, share):
    """The share of 3,000 clips that change; the others are returned as they are."""
    clip = clip_of(6, 6, frames=1)
    rng = np.random.default_rng(1)
    changed = np.mean([change(clip, rng) is not clip for _ in range(3000)])
    assert changed == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 3000) + 1e-12)
