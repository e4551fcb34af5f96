"""Several classes per clip: Charades' frame lists, and `path label` lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.data.charades import Charades
from slowfast_lara.data.frame_lists import HEADER
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.lists import parse_labels
from slowfast_lara.data.loader import val_loader
from slowfast_lara.errors import ConfigError, DataError
from tests.helpers.labelled_sets import CLASSES, write_charades, write_frame
from tests.helpers.runs import write_config, write_video


@pytest.fixture(scope="module")
def charades(tmp_path_factory):
    return write_charades(tmp_path_factory.mktemp("charades"), train=4, val=3, frames=20)


def config(folder, data, **changes):
    changes = {
        "TRAIN__DATASET": "charades",
        "TEST__DATASET": "Charades",
        "MODEL__NUM_CLASSES": CLASSES,
        "MODEL__LOSS_FUNC": "bce_logit",
        "DATA__MULTI_LABEL": True,
        **changes,
    }
    return load_config(write_config(folder / "c.yaml", data, folder, **changes))


def test_a_video_has_the_classes_of_all_its_frames(tmp_path, charades):
    cfg = config(tmp_path, charades)
    for mode, count in (("train", 4), ("val", 3), ("test", 3)):
        dataset = Charades(cfg, mode)
        assert dataset.labels == [(i, i + 1) for i in range(count)]
        assert len(dataset.video_path(0)) == 20
    sample = Charades(cfg, "val")[1]
    assert sample.label.tolist() == [0, 1, 1, 0, 0]


def test_a_training_clip_has_the_classes_of_its_frames(tmp_path, charades):
    """Frames 0 to 9 have class i, the others i and i + 1; a clip spans eight frames."""
    dataset = Charades(config(tmp_path, charades), "train")
    seen = set()
    for epoch in range(30):
        sample = dataset[epoch, 2]
        draws = np.random.default_rng((dataset.cfg.RNG_SEED, epoch, 2)).random(4)
        frames = dataset.clip_frames(dataset.cfg, draws, 20, 30)
        expected = [0, 0, 1, int(frames[-1] >= 10), 0]
        assert sample.label.tolist() == expected
        seen.add(tuple(expected))
    assert len(seen) == 2


def test_classes_of_the_first_and_the_last_frame(tmp_path):
    frames = [f"a 0 {i} a/{i}.jpg {label}" for i, label in enumerate(["4", '""', "0"])]
    (tmp_path / "val.csv").write_text("\n".join([HEADER, *frames]) + "\n")
    for i in range(3):
        write_frame(tmp_path / f"a/{i}.jpg", 0, i)
    assert Charades(config(tmp_path, tmp_path), "val").labels == [(0, 4)]


def test_a_folder_of_frames_is_a_video(tmp_path, charades):
    cfg = config(tmp_path, charades)
    assert Charades.read_views(str(charades / "val1"), cfg).equal(Charades(cfg, "test")[1].views)


def test_batches_are_multi_hot(tmp_path, charades):
    (batch,) = val_loader(config(tmp_path, charades), batch_size=4)
    assert batch.labels.dtype == torch.int64
    assert batch.labels.tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize("name", ["Kinetics", "Charades"])
def test_lists_of_videos_with_several_classes(tmp_path, name, mode):
    write_video(tmp_path / "a b.mp4", 0)
    lines = ["a b.mp4 3,1", "a b.mp4 2", 'a b.mp4 "0,4"', 'a b.mp4 ""']
    (tmp_path / f"{mode}.csv").write_text("\n".join(lines) + "\n")
    cfg = config(tmp_path, tmp_path, TRAIN__DATASET=name, TEST__DATASET=name)
    dataset = {"Kinetics": Kinetics, "Charades": Charades}[name](cfg, mode)
    assert dataset.labels == [(1, 3), (2,), (0, 4), ()]
    for index, expected in ((0, [0, 1, 0, 1, 0]), (3, [0] * 5)):
        assert dataset[(0, index) if mode == "train" else index].label.tolist() == expected


@pytest.mark.parametrize("text", ["1,", ",", "1,,2", "x", "1;2", "5", "-1", "1,5"])
def test_invalid_labels(text):
    with pytest.raises(DataError, match="^FILE, line 3: "):
        parse_labels(text, 5, "FILE, line 3")


def test_invalid_label_in_a_frame_list_names_the_video(tmp_path, charades):
    text = (charades / "val.csv").read_text().replace('"2,3"', "2,77")
    (tmp_path / "val.csv").write_text(text)
    with pytest.raises(DataError, match="val.csv, video val2: label 77"):
        Charades(config(tmp_path, tmp_path, DATA__PATH_PREFIX=str(charades)), "val")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"SOLVER__SMOOTHING": 0.1}, "SOLVER.SMOOTHING"),
        ({"DATA__PATH_LABEL_SEPARATOR": ","}, "DATA.PATH_LABEL_SEPARATOR"),
        ({"TRAIN__DATASET": "Ssv2"}, "DATA.MULTI_LABEL is True.*Ssv2"),
        ({"MODEL__LOSS_FUNC": "cross_entropy"}, "MODEL.LOSS_FUNC.*bce_logit"),
    ],
)
def test_keys_that_do_not_fit(tmp_path, charades, changes, words):
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, charades, **changes)
