"""The default config: PySlowFast 1.0's config, changed and extended by the table in `keys.py`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.checkouts import is_pyslowfast_1
from slowfast_lara.config.keys import all_keys, set_value
from slowfast_lara.errors import InputError

try:
    from slowfast.config.defaults import get_cfg as slowfast_get_cfg
except ModuleNotFoundError as error:
    if error.name != "slowfast":
        raise
    raise InputError("pyslowfast is not installed; pip install pyslowfast==1.0") from None
if not is_pyslowfast_1(slowfast_get_cfg()):
    raise InputError(
        "found a git checkout of PySlowFast or Motionformer, expected pyslowfast 1.0: use an "
        "environment without the checkout, or slowfast_lara.plugin in a checkout of PySlowFast "
        "(docs/pyslowfast.md)"
    )


def get_cfg() -> CfgNode:
    """A new copy of the default config."""
    cfg = slowfast_get_cfg()
    for key, known in all_keys().items():
        if known.default is not ...:
            set_value(cfg, key, copy.deepcopy(known.default))
    return cfg


def walk(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every key below a node; a value may be a node."""
    for key, value in node.items():
        yield prefix + key, value
        if isinstance(value, CfgNode):
            yield from walk(value, f"{prefix}{key}.")
