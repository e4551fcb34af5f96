"""The default config: PySlowFast 1.0's tree, with the keys of `keys.py` laid over it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.checkouts import is_of_a_checkout
from slowfast_lara.config.keys import PYSLOWFAST, all_keys
from slowfast_lara.errors import InputError

try:
    from slowfast.config.defaults import get_cfg as slowfast_get_cfg
except ModuleNotFoundError as error:
    if error.name != "slowfast":
        raise
    raise InputError("pyslowfast is needed for this; pip install pyslowfast==1.0") from None
if is_of_a_checkout(slowfast_get_cfg()):
    raise InputError(
        "the PySlowFast that is found is a git checkout, and this runs on pyslowfast 1.0: use an "
        "environment without the checkout, or slowfast_lara.plugin within it (docs/pyslowfast.md)"
    )


def get_cfg() -> CfgNode:
    """A fresh copy of the default config."""
    cfg = slowfast_get_cfg()
    for key, known in all_keys().items():
        if known.default is not PYSLOWFAST:
            *path, name = key.split(".")
            node = cfg
            for part in path:
                node = node.setdefault(part, CfgNode())
            node[name] = copy.deepcopy(known.default)
    return cfg


def walk(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full name and value of every key below a node, nodes included."""
    for key, value in node.items():
        yield prefix + key, value
        if isinstance(value, CfgNode):
            yield from walk(value, f"{prefix}{key}.")
