"""Motionformer with linear-complexity attention, on PySlowFast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slowfast_lara.lazy import lazy_names

if TYPE_CHECKING:
    from slowfast_lara.attention import build_estimator
    from slowfast_lara.config import load_config
    from slowfast_lara.data import load_views
    from slowfast_lara.inference.load import load
    from slowfast_lara.models import build_model

__version__ = "0.2.0"

__all__ = ["__version__", "build_estimator", "build_model", "load", "load_config", "load_views"]

# `import slowfast_lara` imports neither PyTorch nor PySlowFast.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "build_estimator": "slowfast_lara.attention",
        "build_model": "slowfast_lara.models",
        "load": "slowfast_lara.inference.load",
        "load_config": "slowfast_lara.config",
        "load_views": "slowfast_lara.data",
    },
)
