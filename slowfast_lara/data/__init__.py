"""Video input: frame sources, clips and views, augmentation, datasets, loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slowfast_lara.lazy import lazy_names

if TYPE_CHECKING:
    from slowfast_lara.data.dataset import VideoDataset
    from slowfast_lara.data.kinetics import Kinetics
    from slowfast_lara.data.registry import DATASETS, load_views
    from slowfast_lara.data.ssv2 import Ssv2

__all__ = ["DATASETS", "Kinetics", "Ssv2", "VideoDataset", "load_views"]

# Imported lazily, because tools that prepare data import this package without PyTorch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DATASETS": "slowfast_lara.data.registry",
        "Kinetics": "slowfast_lara.data.kinetics",
        "Ssv2": "slowfast_lara.data.ssv2",
        "VideoDataset": "slowfast_lara.data.dataset",
        "load_views": "slowfast_lara.data.registry",
    },
)
