"""Labelled example clips in TensorBoard."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from slowfast_lara.config import load_config
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.engine.progress import write_clips
from tests.helpers.small_models import NAMES, make_videos

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_clips_of_different_classes(model, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    folder = make_videos(tmp_path / "set", 0, "--val", "12", "--frames", "12")
    dataset = Kinetics(load_config(model.cfg, ["DATA.PATH_TO_DATA_DIR", str(folder)]), "val")
    with SummaryWriter(str(tmp_path / "events")) as writer:
        write_clips(writer, dataset, NAMES, count=4)
    accumulator = events.EventAccumulator(str(tmp_path / "events"))
    accumulator.Reload()
    tags = accumulator.Tags()["images"]
    labels = [int(tag.removeprefix("clips/").split("_")[0]) for tag in tags]
    assert sorted(labels) == sorted(list(dict.fromkeys(dataset.labels))[:4])
    assert all(NAMES[label] in tag for label, tag in zip(labels, tags) if label < 3)
    for label, tag in zip(labels, tags):
        (entry,) = accumulator.Images(tag)
        image = np.asarray(Image.open(io.BytesIO(entry.encoded_image_string))).astype(float)
        assert image.shape == (32, 4 * 32, 3)
        clip = dataset[dataset.labels.index(label)].clip
        frames = clip.permute(2, 1, 3, 0).flatten(1, 2).numpy() * 0.225 + 0.45
        np.testing.assert_allclose(image / 255, frames, atol=0.01)
