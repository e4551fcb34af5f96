"""Video input: frame sources, clips and views, augmentation, datasets, loaders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from fvcore.common.config import CfgNode

__all__ = ["load_views"]


def load_views(path: str | os.PathLike[str], cfg: CfgNode) -> torch.Tensor:
    """Read all test views of a video.

    Args:
        path: a video file; with Ssv2 also a folder of extracted frames.
        cfg: the config; the dataset class cfg.TEST.DATASET chooses the frames.

    Returns:
        float32 [clips * crops, 3, T, H, W], clip-major, normalised.
    """
    # Imported here because tools that prepare data import this package without PyTorch.
    from slowfast_lara.data.registry import dataset_class

    return dataset_class(cfg, "TEST").read_views(os.fspath(path), cfg)
