"""Configs of PySlowFast git checkouts and forks, which have more keys than pyslowfast 1.0."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from slowfast_lara.config.keys import all_keys, get_value, set_value


def is_git_checkout_config(tree: Mapping[str, Any]) -> bool:
    """Whether a config is of a git checkout: pyslowfast 1.0 has no TRAIN.MIXED_PRECISION."""
    train = tree.get("TRAIN")
    return isinstance(train, Mapping) and "MIXED_PRECISION" in train


def shared_part(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values of a git checkout's config that have the same meaning in this package."""
    part: dict[str, Any] = {}
    for key, known in all_keys().items():
        with contextlib.suppress(KeyError):
            if known.shared:
                set_value(part, key, get_value(tree, key))
    return part
