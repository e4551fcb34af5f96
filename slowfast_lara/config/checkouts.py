"""Configs of a PySlowFast from git, or of a fork of it: how to know one, and what it shares.

Its tree has grown since pyslowfast 1.0, on which our own commands run, and has other defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from slowfast_lara.config.keys import all_keys

# What a model computes from a video, and what it is tested with. All else is about its training.
_SHARED = (
    "VIT.*",
    "MODEL.MODEL_NAME",
    "MODEL.NUM_CLASSES",
    "DATA.NUM_FRAMES",
    "DATA.SAMPLING_RATE",
    "DATA.TARGET_FPS",
    "DATA.MEAN",
    "DATA.STD",
    "DATA.REVERSE_INPUT_CHANNEL",
    "DATA.TRAIN_JITTER_SCALES",
    "DATA.TRAIN_CROP_SIZE",
    "DATA.TEST_CROP_SIZE",
    "TRAIN.DATASET",
    "TEST.DATASET",
    "TEST.NUM_ENSEMBLE_VIEWS",
    "TEST.NUM_SPATIAL_CROPS",
    "RNG_SEED",
)


def is_of_a_checkout(tree: Mapping[str, Any]) -> bool:
    """Whether a config is of a PySlowFast from git: 1.0 has no mixed precision."""
    train = tree.get("TRAIN")
    return isinstance(train, Mapping) and "MIXED_PRECISION" in train


def shared_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a checkout's config that mean here what they mean there."""
    shared: dict[str, Any] = {}
    for key in all_keys():
        if any(fnmatchcase(key, pattern) for pattern in _SHARED):
            *path, name = key.split(".")
            theirs: Any = tree
            for part in path:
                theirs = theirs.get(part) if isinstance(theirs, Mapping) else None
            if isinstance(theirs, Mapping) and name in theirs:
                ours = shared
                for part in path:
                    ours = ours.setdefault(part, {})
                ours[name] = theirs[name]
    return shared
