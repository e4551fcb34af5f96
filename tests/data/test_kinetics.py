from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch

from slowfast_lara.data import load_views
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.errors import DataError
from tests.helpers.videos import config, decode_all, write_video


@pytest.fixture
def cfg(synthetic):
    return config(
        DATA__PATH_TO_DATA_DIR=str(synthetic),
        DATA__USE_RAND_AUGMENT=True,
        DATA__COLORJITTER=True,
        DATA__INV_UNIFORM_SAMPLE=True,
    )


def test_samples_depend_on_seed_epoch_and_index_only(cfg):
    dataset = Kinetics(cfg, "train")
    sample = dataset[(2, 5)]
    assert sample.clip.shape == (3, 8, 32, 32) and sample.clip.dtype == torch.float32
    assert (sample.label, sample.index, sample.failures) == (dataset.labels[5], 5, [])
    np.random.seed(0)
    torch.manual_seed(0)
    assert torch.equal(Kinetics(cfg, "train")[(2, 5)].clip, sample.clip)
    assert torch.equal(dataset[5].clip, dataset[(0, 5)].clip)
    others = [dataset[(3, 5)], dataset[(2, 6)]]
    cfg.RNG_SEED = 7
    others.append(Kinetics(cfg, "train")[(2, 5)])
    assert not any(torch.equal(other.clip, sample.clip) for other in others)


def test_random_clips_are_parts_of_the_video(tmp_path):
    """Without scaling and colours, each frame is a crop of the right frame."""
    path = write_video(tmp_path / "a.mp4", 90, size=(32, 64))
    (tmp_path / "train.csv").write_text(f"{path} 0\n")
    cfg = config(
        DATA__PATH_TO_DATA_DIR=str(tmp_path),
        DATA__TRAIN_JITTER_SCALES=[32, 32],
        DATA__MEAN=[0.0] * 3,
        DATA__STD=[1.0] * 3,
    )
    dataset, (frames, _) = Kinetics(cfg, "train"), decode_all(path)
    crops = defaultdict(list)
    for crop in itertools.product(range(90), range(33), (1, -1)):
        index, x, flip = crop
        crops[frames[index][:, x : x + 32][:, ::flip].tobytes()].append(crop)
    found = set()
    for epoch in range(30):
        clip = (dataset[(epoch, 0)].clip * 255).round().byte().permute(1, 2, 3, 0).numpy()
        ((first, x, flip),) = crops[clip[0].tobytes()]
        found.add((first, x, flip))
        start = [
            index
            for index in range(90)
            if np.array_equal(frames[index][:, x : x + 32][:, ::flip], clip[-1])
        ]
        assert start[0] - first in (14, 15, 16)  # 15 frames later; fractions are truncated
    assert len(found) == 30 and {flip for _, _, flip in found} == {1, -1}


def test_random_flip_can_be_disabled(tmp_path):
    path = write_video(tmp_path / "a.mp4", 16, size=(32, 32))
    (tmp_path / "train.csv").write_text(f"{path} 0\n")
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path), DATA__TRAIN_JITTER_SCALES=[32, 32])
    flipping = Kinetics(cfg, "train")
    assert len({flipping[(e, 0)].clip.numpy().tobytes() for e in range(20)}) == 2
    cfg.DATA.RANDOM_FLIP = False
    steady = Kinetics(cfg, "train")
    assert len({steady[(e, 0)].clip.numpy().tobytes() for e in range(20)}) == 1


def test_random_resized_crops(cfg):
    cfg.DATA.USE_RANDOM_RESIZE_CROPS = True
    dataset = Kinetics(cfg, "train")
    clips = [dataset[(epoch, 0)].clip for epoch in range(5)]
    assert all(clip.shape == (3, 8, 32, 32) for clip in clips)
    assert not torch.equal(clips[0], clips[1])


def test_validation_reads_the_central_view(cfg):
    dataset = Kinetics(cfg, "val")
    assert len(dataset) == 13
    cfg.TEST.NUM_ENSEMBLE_VIEWS = cfg.TEST.NUM_SPATIAL_CROPS = 1  # one view, the centre
    for index in range(3):
        sample = dataset[(9, index)]
        assert torch.equal(sample.clip, load_views(dataset.paths[index], cfg)[0])


def test_test_views(cfg):
    dataset = Kinetics(cfg, "test")
    video = dataset[4]
    assert torch.equal(video.views, load_views(dataset.paths[4], cfg))
    assert video[1:] == (dataset.labels[4], 4, dataset.paths[4], None)


def write_broken(tmp_path, good: int, bad: int):
    """A list of bad videos before good ones."""
    lines = []
    for number in range(bad):
        path = tmp_path / f"bad {number}.mp4"
        path.write_bytes(b"no video" * number)
        lines.append(f"{path} 1\n")
    for number in range(good):
        path = write_video(tmp_path / f"{number}.mp4", 16)
        lines.append(f"{path} 2\n")
    for mode in ("train", "val", "test"):
        (tmp_path / f"{mode}.csv").write_text("".join(lines))
    return config(DATA__PATH_TO_DATA_DIR=str(tmp_path))


def test_broken_videos_are_replaced_in_training_only(tmp_path):
    cfg = write_broken(tmp_path, good=2, bad=2)
    train = Kinetics(cfg, "train")
    for epoch in range(5):
        sample = train[(epoch, 1)]
        assert sample.index == 1 and sample.label == 2 and sample.clip is not None
        assert sample.failures[0].path == train.paths[1]
        assert torch.equal(train[(epoch, 1)].clip, sample.clip)
        assert train[(epoch, 1)].failures == sample.failures
    val = Kinetics(cfg, "val")[0]
    assert val.clip is None and val.label == 1 and val.failures[0].path == train.paths[0]
    test = Kinetics(cfg, "test")[1]
    assert test.views is None and test.path == train.paths[1] and test.error


def test_nothing_but_broken_videos(tmp_path):
    dataset = Kinetics(write_broken(tmp_path, good=0, bad=3), "train")
    with pytest.raises(DataError, match="10 videos in a row.*bad 0.mp4"):
        dataset[0]


def test_a_wrong_prefix_is_found_when_the_dataset_is_built(tmp_path):
    names = [f"{number}.mp4" for number in range(1000)]
    (tmp_path / "train.csv").write_text("".join(f"{name} 1\n" for name in names))
    (tmp_path / "videos").mkdir()
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path), DATA__PATH_PREFIX=str(tmp_path / "wrong"))
    with pytest.raises(DataError) as caught:
        Kinetics(cfg, "train")
    message = str(caught.value)
    assert "DATA.PATH_PREFIX is " in message and "the 8 videos checked" in message
    assert message.endswith(str(tmp_path / "wrong/0.mp4")) and "\n" not in message
    cfg.DATA.PATH_PREFIX = ""
    with pytest.raises(DataError, match=f"PATH_PREFIX is ''.*{tmp_path}/0.mp4"):
        Kinetics(cfg, "train")
    # One existing video is enough: often some videos of a dataset are missing.
    cfg.DATA.PATH_PREFIX = str(tmp_path / "videos")
    (tmp_path / "videos" / "999.mp4").touch()
    assert len(Kinetics(cfg, "train")) == 1000


def test_wrong_mode_and_index(cfg):
    with pytest.raises(ValueError, match="train, val, test"):
        Kinetics(cfg, "training")
    with pytest.raises(IndexError):
        Kinetics(cfg, "train")[50]
