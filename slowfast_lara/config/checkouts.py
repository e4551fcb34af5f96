"""Configs of PySlowFast git checkouts and of Motionformer: detection, checks and shared keys."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from slowfast_lara.config.keys import all_keys, get_value, set_value
from slowfast_lara.errors import ConfigError

_value = partial(get_value, default=None)
# Values that this package requires; PySlowFast's own models may use other values.
_REQUIRED = {
    "MODEL.HEAD_ACT": "softmax",
    "DETECTION.ENABLE": False,
    "MASK.ENABLE": False,
    "MULTIGRID.LONG_CYCLE": False,  # a long cycle varies the number of frames
    # A short cycle varies the crop size, also to sizes that are not multiples of the patch size.
    "MULTIGRID.SHORT_CYCLE": False,
}


def is_pyslowfast_1(tree: Mapping[str, Any]) -> bool:
    """Whether a config has the keys of pyslowfast 1.0, as all configs of slowfast_lara do.

    In versions before 1.0, DATA has no CROP_SIZE. Later versions and Motionformer have BENCHMARK.
    """
    data = tree.get("DATA")
    return isinstance(data, Mapping) and "CROP_SIZE" in data and "BENCHMARK" not in tree


def is_motionformer(tree: Mapping[str, Any]) -> bool:
    """Whether this is a Motionformer config: PySlowFast has no SOLVER.USE_MIXED_PRECISION."""
    return _value(tree, "SOLVER.USE_MIXED_PRECISION") is not None and not is_pyslowfast_1(tree)


def check_checkout(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkout's config has a value in conflict with _REQUIRED."""
    if is_motionformer(tree):  # Motionformer's model does not read these keys
        return
    for key, required in _REQUIRED.items():
        if (value := _value(tree, key)) not in (None, required):
            raise ConfigError(
                f"{key} is {value!r:.80}; must be {required!r} with VisionTransformer"
            )


def shared_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a checkout's config that have the same meaning in this package.

    All other keys affect neither the model nor its input, or are examined by `check_checkout` or
    `differences`.
    """
    part: dict[str, Any] = {}
    for key, known in all_keys().items():
        with contextlib.suppress(KeyError):
            if known.shared:
                set_value(part, key, get_value(tree, key))
    return part


def differences(tree: Mapping[str, Any]) -> list[str]:
    """Settings of a checkout that make its scores differ from those of this package."""
    known = shared_part(tree)["VIT"]
    found = [f"VIT.{key:.80} is unknown" for key in tree["VIT"] if key not in known]
    if _value(tree, "DATA.USE_OFFSET_SAMPLING"):
        found.append("DATA.USE_OFFSET_SAMPLING True selects different frames")
    scales, crop = _value(tree, "DATA.TRAIN_JITTER_SCALES"), _value(tree, "DATA.TEST_CROP_SIZE")
    one_crop = _value(tree, "TEST.NUM_SPATIAL_CROPS") == 1 and not is_motionformer(tree)
    if one_crop and isinstance(scales, list) and scales[:1] != [crop]:
        found.append(
            "TEST.NUM_SPATIAL_CROPS 1 scales the short side to DATA.TRAIN_JITTER_SCALES[0], but "
            "slowfast_lara scales it to DATA.TEST_CROP_SIZE"
        )
    if _value(tree, "TEST.SHUFFLE_FRAMES"):
        found.append("TEST.SHUFFLE_FRAMES True shuffles the frames")
    if (method := _value(tree, "DATA.ENSEMBLE_METHOD")) not in (None, "sum"):
        found.append(f"DATA.ENSEMBLE_METHOD is {method!r:.20}; slowfast_lara averages scores")
    return found
