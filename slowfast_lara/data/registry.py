"""Registry of the datasets that TRAIN.DATASET and TEST.DATASET can name.

To add a dataset, subclass VideoDataset, Kinetics or Ssv2 and call `DATASETS.register(YourSet)`
before loading the config. (PySlowFast has its own registry, with another class named Kinetics.)
"""

from __future__ import annotations

from fvcore.common.config import CfgNode
from fvcore.common.registry import Registry

from slowfast_lara.data.charades import Charades
from slowfast_lara.data.dataset import VideoDataset
from slowfast_lara.data.epickitchens import Epickitchens
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.ssv2 import Ssv2
from slowfast_lara.errors import ConfigError

DATASETS = Registry("datasets")
for known_class in (Kinetics, Ssv2, Epickitchens, Charades):
    DATASETS.register(known_class)


def dataset_class(cfg: CfgNode, part: str) -> type[VideoDataset]:
    """The class that `part`.DATASET names (`part`: "TRAIN" or "TEST"); letter case is ignored."""
    name, classes = cfg[part].DATASET, dict(DATASETS)
    for known in classes:
        if known.lower() == name.lower():
            return classes[known]
    raise ConfigError(f"{part}.DATASET is {name!r}; must be one of {', '.join(classes)}")
