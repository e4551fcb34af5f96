"""The datasets that TRAIN.DATASET and TEST.DATASET can name.

A set of your own: a subclass of VideoDataset, Kinetics or Ssv2, registered with
`DATASETS.register(YourSet)` before the config is loaded. (Not PySlowFast's registry:
its own Kinetics is in there, and no name can be given twice.)
"""

from __future__ import annotations

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.ssv2 import Ssv2
from slowfast_lara.errors import ConfigError

DATASETS = Registry("datasets")
DATASETS.register(Kinetics)
DATASETS.register(Ssv2)


def dataset_class(cfg: CfgNode, part: str) -> type[VideoDataset]:
    """The dataset of a `part` of the config, "TRAIN" or "TEST"; "kinetics" is Kinetics too."""
    name, classes = cfg[part].DATASET, dict(DATASETS)
    for known in classes:
        if known.lower() == name.lower():
            return classes[known]
    raise ConfigError(f"{part}.DATASET is {name!r}; supported datasets: {', '.join(classes)}")
