"""Datasets by their name in a config, including a user's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fvcore.common.registry import Registry
from slowfast.datasets.build import DATASET_REGISTRY
from slowfast.datasets.kinetics import Kinetics as PySlowFastKinetics

from slowfast_lara.config import load_config
from slowfast_lara.data import load_views, registry
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.loader import test_loader as make_test_loader
from slowfast_lara.data.loader import train_loader
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.ssv2 import Ssv2
from slowfast_lara.errors import ConfigError
from tests.helpers.videos import REPOSITORY, config


@pytest.mark.parametrize(
    "name, expected",
    [("Kinetics", Kinetics), ("kinetics", Kinetics), ("Ssv2", Ssv2), ("ssv2", Ssv2)],
)
def test_names_in_any_case(name, expected):
    assert dataset_class(config(TRAIN__DATASET=name), "TRAIN") is expected
    assert dataset_class(config(TEST__DATASET=name), "TEST") is expected


def test_unknown_name():
    with pytest.raises(ConfigError, match="^TEST.DATASET is 'Ava'; .* Kinetics, Ssv2, .*--import"):
        dataset_class(config(TEST__DATASET="Ava"), "TEST")


def test_pyslowfast_registry_is_unchanged():
    assert DATASET_REGISTRY.get("Kinetics") is PySlowFastKinetics is not Kinetics


class FirstFrames(Kinetics):
    """A user's dataset: the first frames of any video."""

    @classmethod
    def view_frames(cls, cfg, view, num_views, video_frames, fps):
        return np.arange(cfg.DATA.NUM_FRAMES).clip(0, video_frames - 1)


def test_a_users_own_dataset(synthetic, monkeypatch):
    # A copy: entries of a registry cannot be removed, and other tests use the same one.
    monkeypatch.setattr(registry, "DATASETS", Registry("copy"))
    for dataset in (Kinetics, Ssv2, FirstFrames):
        registry.DATASETS.register(dataset)
    names = ["TRAIN.DATASET", "firstframes", "TEST.DATASET", "FirstFrames"]
    assert load_config(REPOSITORY / "configs/quick/lara.yaml", names).TEST.DATASET == "FirstFrames"
    cfg = config(
        TRAIN__DATASET="FirstFrames",
        TEST__DATASET="FirstFrames",
        DATA__PATH_TO_DATA_DIR=str(synthetic),
    )
    assert type(train_loader(cfg, batch_size=2).dataset) is FirstFrames
    video = next(iter(make_test_loader(cfg)))
    assert torch.equal(video.views, load_views(video.path, cfg))
    assert torch.equal(video.views[0], video.views[3])  # every clip is the same
    cfg.TEST.DATASET = "Kinetics"
    assert not torch.equal(video.views, load_views(video.path, cfg))
