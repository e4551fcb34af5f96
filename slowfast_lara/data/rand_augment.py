"""RandAugment: a few random operations, the same on all frames of a clip.

Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space"
(2020). The notation rand-m20-n2-mstd0.5-inc means: draw n operations and apply each of them with
probability 1/2, at a magnitude drawn from a normal distribution (mean m, standard deviation mstd)
and clipped to 0..10. The strength of an operation is magnitude / 10. See `operations` for "inc".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import cv2
import numpy as np

from slowfast_lara.data.transforms import brightness, by_frame, contrast, look_up, saturation

NOTATION = re.compile(r"rand-m(\d+(?:\.\d+)?)-n(\d+)(?:-mstd(\d+(?:\.\d+)?))?(-inc)?")
PROBABILITY = 0.5
MAX_MAGNITUDE = 10
# Colour of pixels that a warp takes from outside the frame: the mean colour of Kinetics.
FILL = (115, 115, 115)

Operation = Callable[[np.ndarray, float], np.ndarray]


def auto_contrast(clip: np.ndarray) -> np.ndarray:
    """Stretch the values of each channel of each frame linearly to 0..255."""

    def stretch(histogram: np.ndarray) -> np.ndarray:
        used = histogram.nonzero()[0]
        low, high = used[0], used[-1]
        if low == high:
            return np.arange(256)
        return np.trunc((np.arange(256) - low) * (255 / (high - low)))

    return _by_histogram(clip, stretch)


def equalize(clip: np.ndarray) -> np.ndarray:
    """Equalise the histogram of each channel of each frame."""

    def flatten(histogram: np.ndarray) -> np.ndarray:
        used = histogram[histogram.nonzero()]
        step = (histogram.sum() - used[-1]) // 255
        if step == 0:
            return np.arange(256)
        below = np.concatenate([[0], histogram.cumsum()[:-1]])
        return (below + step // 2) // step

    return _by_histogram(clip, flatten)


def _by_histogram(clip: np.ndarray, table_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    def change(frame: np.ndarray, out: np.ndarray) -> None:
        # cv2.calcHist counts in float32, which is exact up to 2^24 pixels per frame.
        counts = [cv2.calcHist([frame], [channel], None, [256], [0, 256]) for channel in range(3)]
        tables = [table_of(count.ravel().astype(np.int64)) for count in counts]
        out[:] = look_up(frame, np.stack(tables, axis=-1))

    return by_frame(clip, change)


def posterize(clip: np.ndarray, bits: int) -> np.ndarray:
    """Keep the `bits` most significant bits of each value."""
    return clip & np.uint8(256 - 2 ** (8 - bits))


def solarize(clip: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the values at or above the threshold."""
    values = np.arange(256)
    return look_up(clip, np.where(values < threshold, values, 255 - values))


def solarize_add(clip: np.ndarray, added: int) -> np.ndarray:
    """Add `added` to the values below 128."""
    values = np.arange(256)
    return look_up(clip, np.where(values < 128, values + added, values))


def sharpness(clip: np.ndarray, factor: float) -> np.ndarray:
    """Blend a smoothed clip (factor 0) and the clip (factor 1); larger factors extrapolate."""
    smooth = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13

    def change(frame: np.ndarray, out: np.ndarray) -> None:
        smoothed = frame.copy()  # the outermost pixels are not smoothed
        smoothed[1:-1, 1:-1] = cv2.filter2D(frame, -1, smooth)[1:-1, 1:-1]
        cv2.addWeighted(frame, factor, smoothed, 1 - factor, 0, dst=out)

    return by_frame(clip, change)


def affine(clip: np.ndarray, matrix: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
    """Warp by `matrix` [2, 3], which maps coordinates of the result to those of the clip."""
    inverse_map, size = np.array(matrix, float), (clip.shape[2], clip.shape[1])
    options: dict = {"borderMode": cv2.BORDER_CONSTANT, "borderValue": FILL}
    options["flags"] = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return by_frame(
        clip, lambda frame, out: cv2.warpAffine(frame, inverse_map, size, dst=out, **options)
    )


def rotate(clip: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate counter-clockwise about the centre."""
    centre = ((clip.shape[2] - 1) / 2, (clip.shape[1] - 1) / 2)
    forward = cv2.getRotationMatrix2D(centre, degrees, 1)
    return affine(clip, cv2.invertAffineTransform(forward))


def operations(increasing: bool) -> tuple[dict[str, Operation], dict[str, Operation]]:
    """Return {name: operation} for strengths 0 to 1, and {name: operation} for strengths -1 to 1.

    If `increasing` ("inc" in the notation), the effect never decreases with the absolute strength.
    Otherwise, posterize and solarize change the clip most at strength 0. The factor of color,
    contrast, brightness and sharpness is then 0.1 at strength 0, 1 (no change) at 0.5 and 1.9 at 1.
    """
    base, step = (1, 0.9) if increasing else (0.1, 1.8)

    def enhancement(change: Operation) -> Operation:
        return lambda clip, s: change(clip, base + s * step)

    def level(s: float, count: int) -> int:
        return count - int(s * count) if increasing else int(s * count)

    one_sided: dict[str, Operation] = {
        "auto_contrast": lambda clip, s: auto_contrast(clip),
        "equalize": lambda clip, s: equalize(clip),
        "invert": lambda clip, s: 255 - clip,
        "posterize": lambda clip, s: posterize(clip, level(s, 4)),
        "solarize": lambda clip, s: solarize(clip, level(s, 256)),
        "solarize_add": lambda clip, s: solarize_add(clip, int(s * 110)),
    }
    symmetric: dict[str, Operation] = {
        "rotate": lambda clip, s: rotate(clip, s * 30),
        "shear_x": lambda clip, s: affine(clip, [[1, s * 0.3, 0], [0, 1, 0]]),
        "shear_y": lambda clip, s: affine(clip, [[1, 0, 0], [s * 0.3, 1, 0]]),
        "translate_x": lambda clip, s: affine(clip, [[1, 0, s * 0.45 * clip.shape[2]], [0, 1, 0]]),
        "translate_y": lambda clip, s: affine(clip, [[1, 0, 0], [0, 1, s * 0.45 * clip.shape[1]]]),
    }
    enhancements = {
        "color": enhancement(saturation),
        "contrast": enhancement(contrast),
        "brightness": enhancement(brightness),
        "sharpness": enhancement(sharpness),
    }
    (symmetric if increasing else one_sided).update(enhancements)
    return one_sided, symmetric


class RandAugment:
    """Applies RandAugment to clips; `spec` is a string such as rand-m20-n2-mstd0.5-inc."""

    def __init__(self, spec: str) -> None:
        match = NOTATION.fullmatch(spec)
        if match is None:
            raise ValueError(
                f"RandAugment is {spec!r}; must be of the form "
                "rand-m<magnitude>-n<operations>[-mstd<deviation>][-inc]"
            )
        magnitude, operations, spread, increasing = match.groups()
        self._magnitude, self._spread = float(magnitude), float(spread or 0)
        self._count = int(operations)
        self._increasing = increasing is not None

    def __call__(self, clip: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        # Built in every call: stored lambdas could not be pickled for spawned workers.
        one_sided, symmetric = operations(self._increasing)
        for name in rng.choice(sorted([*one_sided, *symmetric]), self._count):
            applied, sign = rng.random() < PROBABILITY, rng.choice([-1, 1])
            magnitude = np.clip(rng.normal(self._magnitude, self._spread), 0, MAX_MAGNITUDE)
            strength = float(magnitude) / MAX_MAGNITUDE
            if applied and name in symmetric:
                clip = symmetric[name](clip, sign * strength)
            elif applied:
                clip = one_sided[name](clip, strength)
        return clip
