"""Motionformer with linear-complexity attention, on PySlowFast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slowfast_lara.attention import build_estimator
    from slowfast_lara.config import load_config
    from slowfast_lara.data import load_views
    from slowfast_lara.models import build_model

__version__ = "0.2.0"

__all__ = ["__version__", "build_estimator", "build_model", "load_config", "load_views"]

# Imported when they are asked for: `import slowfast_lara` loads no PyTorch.
_HOMES = {
    "build_estimator": "slowfast_lara.attention",
    "build_model": "slowfast_lara.models",
    "load_config": "slowfast_lara.config",
    "load_views": "slowfast_lara.data",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
