"""Registry of the datasets that TRAIN.DATASET and TEST.DATASET can name.

To add a dataset, subclass VideoDataset, Kinetics or Ssv2 and decorate it with
`@DATASETS.register()` (docs/extend.md). (PySlowFast has its own registry, with another class named
Kinetics.)
"""

from __future__ import annotations

import os

import torch
from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from slowfast_lara.data.charades import Charades
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.epickitchens import Epickitchens
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.ssv2 import Ssv2
from slowfast_lara.errors import ConfigError
from slowfast_lara.user_code import OWN_CODE

DATASETS = Registry("datasets")
for known_class in (Kinetics, Ssv2, Epickitchens, Charades):
    DATASETS.register(known_class)


def dataset_class(cfg: CfgNode, part: str) -> type[VideoDataset]:
    """The class that `part`.DATASET names (`part`: "TRAIN" or "TEST"); letter case is ignored."""
    name, classes = cfg[part].DATASET, dict(DATASETS)
    for known in classes:
        if known.lower() == name.lower():
            return classes[known]
    known = ", ".join(classes)
    raise ConfigError(f"{part}.DATASET is {name!r}; must be one of {known} ({OWN_CODE})")


def load_views(path: str | os.PathLike[str], cfg: CfgNode) -> torch.Tensor:
    """Read all test views of a video.

    Args:
        path: a video file; with Ssv2, Charades or Epickitchens also a folder of extracted frames.
        cfg: the config; the dataset class cfg.TEST.DATASET chooses the frames.

    Returns:
        float32 [clips * crops, 3, T, H, W], clip-major, normalised.
    """
    return dataset_class(cfg, "TEST").read_views(os.fspath(path), cfg)
