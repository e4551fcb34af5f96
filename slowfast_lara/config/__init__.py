"""The config: keys (PySlowFast's and new ones), loading, validation and shipped configs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slowfast_lara.lazy import lazy_names

if TYPE_CHECKING:
    from slowfast_lara.config.defaults import get_cfg
    from slowfast_lara.config.load import load_config
    from slowfast_lara.config.validate import check_machine

__all__ = ["check_machine", "get_cfg", "load_config"]

# Imported lazily, so that listing the shipped configs does not import PyTorch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "check_machine": "slowfast_lara.config.validate",
        "get_cfg": "slowfast_lara.config.defaults",
        "load_config": "slowfast_lara.config.load",
    },
)
