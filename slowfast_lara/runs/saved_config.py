"""The config saved in a checkpoint, and its differences from the current config."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode

from slowfast_lara.config import get_cfg
from slowfast_lara.config.checkouts import is_pyslowfast_1, shared_part
from slowfast_lara.config.keys import Affects, all_keys, get_value
from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.errors import CheckpointError, ConfigError
from slowfast_lara.runs.checkpoint import TrainedAttention

logger = logging.getLogger(__name__)

# Shortens values in messages: a value from a checkpoint may have any type and depth.
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80


class Change(NamedTuple):
    """A setting that differs between a checkpoint and the current config."""

    name: str
    saved: Any
    current: Any
    affects: Affects

    def __str__(self) -> str:
        return f"{self.name} was {_SHORT.repr(self.saved)}, is now {_SHORT.repr(self.current)}"


def describe(changes: Iterable[Change]) -> str:
    return "; ".join(map(str, changes))


def check_model(
    path: str, content: dict[str, Any], cfg: CfgNode, *, swap_attention: bool = False
) -> TrainedAttention:
    """Raise CheckpointError if a checkpoint was trained with different model settings.

    Args:
        path: The checkpoint, for messages.
        content: The content of the checkpoint.
        cfg: The config of the model that will load the weights.
        swap_attention: Accept weights that were trained with a different attention.

    Returns:
        Whether the weights were trained with the attention of `cfg`. If the checkpoint has no
        config: UNKNOWN if `swap_attention` is set, else SAME.
    """
    changes = config_changes(content, cfg, Affects.ATTENTION)
    swapped = [change for change in changes if change.affects == Affects.ATTENTION]
    if swap_attention:
        changes = [change for change in changes if change not in swapped]
    if changes:
        raise CheckpointError(
            f"{path} was trained with different model settings: {describe(changes)}"
        )
    if swapped:
        logger.info("Using weights of %s with a different attention: %s", path, describe(swapped))
        return TrainedAttention.OTHER
    unknown = swap_attention and saved_config(content) is None
    return TrainedAttention.UNKNOWN if unknown else TrainedAttention.SAME


def config_changes(content: dict[str, Any], cfg: CfgNode, least: Affects) -> list[Change]:
    """Changes from a checkpoint's config to `cfg` in keys whose `affects` is at least `least`.

    If the checkpoint has no config, the list is empty. SOLVER.PRECISION is ignored if neither
    config uses mixed precision.
    """
    tree = saved_config(content)
    if tree is None:
        return []
    changes, defaults = [], get_cfg()
    mixed = cfg.SOLVER.USE_MIXED_PRECISION or _value(tree, "SOLVER.USE_MIXED_PRECISION", defaults)
    for key, known in all_keys().items():
        saved, current = _value(tree, key, defaults), get_value(cfg, key)
        if key == "SOLVER.PRECISION" and not mixed:
            continue
        if known.affects >= least and not _same(key, saved, current):
            changes.append(Change(key, saved, current, known.affects))
    return changes


def saved_value(content: dict[str, Any], key: str) -> Any:
    """The value of a key in a checkpoint's config, or its default; None if there is no config."""
    tree = saved_config(content)
    return None if tree is None else _value(tree, key, get_cfg())


def saved_config(content: dict[str, Any]) -> dict[str, Any] | None:
    """The config in a checkpoint; None if it is missing or has no VIT node.

    Of a `checkout_config`, only the keys that have the same meaning in this package.
    """
    checkout = checkout_config(content)
    if checkout is not None:
        return shared_part(checkout)
    tree = _raw_config(content)
    return tree if isinstance(tree.get("VIT"), dict) else None


def checkout_config(content: dict[str, Any]) -> dict[str, Any] | None:
    """The config of a checkpoint from a PySlowFast git checkout or Motionformer; otherwise None."""
    tree = _raw_config(content)
    return tree if isinstance(tree.get("VIT"), dict) and not is_pyslowfast_1(tree) else None


def _raw_config(content: dict[str, Any]) -> dict[str, Any]:
    """The config in a checkpoint, parsed but not merged with defaults; {} if unreadable."""
    text = content.get("cfg")
    try:
        return parse_yaml(text, "the checkpoint's config") if isinstance(text, str) else {}
    except ConfigError:
        return {}


def _value(tree: dict[str, Any], key: str, defaults: CfgNode) -> Any:
    """The value of a key; its default if the checkpoint is older than the key."""
    return get_value(tree, key, get_value(defaults, key))


def _same(key: str, saved: Any, current: Any) -> bool:
    if key == "TRAIN.DATASET":  # dataset names are case-insensitive
        return str(saved).lower() == str(current).lower()
    return saved == current
