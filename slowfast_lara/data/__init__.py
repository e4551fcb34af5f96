"""Video in: sources of frames, clips and views, augmentation, datasets, loaders."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from fvcore.common.config import CfgNode

__all__ = ["load_views"]


def load_views(path: str | os.PathLike[str], cfg: CfgNode) -> torch.Tensor:
    """The views of a test: float32 [clips * crops, 3, T, H, W], clip-major, normalised.

    cfg.TEST.DATASET chooses the frames. `path` is a video; with Ssv2 also a folder of
    extracted frames.
    """
    # Imported when called: tools that prepare data have no use for PyTorch.
    from slowfast_lara.data.registry import dataset_class

    return dataset_class(cfg, "TEST").read_views(os.fspath(path), cfg)
