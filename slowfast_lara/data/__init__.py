"""Video in: sources of frames, clips and views, augmentation, datasets, loaders."""

from __future__ import annotations

from typing import Any

__all__ = ["load_views"]


def __getattr__(name: str) -> Any:
    # Only when asked for: tools that prepare data have no use for PyTorch.
    if name == "load_views":
        from slowfast_lara.data.views import load_views

        return load_views
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
