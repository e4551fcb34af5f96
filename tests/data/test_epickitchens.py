"""EPIC-KITCHENS: annotations, frames of an action, and invalid files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from slowfast_lara.config import load_config
from slowfast_lara.data.classes import names_in
from slowfast_lara.data.epickitchens import Epickitchens
from slowfast_lara.data.frame_range import FrameRange
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.sampling import clip_indices
from slowfast_lara.data.sources import read_image
from slowfast_lara.errors import DataError, DecodeError
from tests.helpers.labelled_sets import (
    COLUMNS,
    NOUNS,
    VERBS,
    action_row,
    write_annotations,
    write_frame,
    write_kitchens,
)
from tests.helpers.runs import write_config


@pytest.fixture(scope="module")
def kitchens(tmp_path_factory):
    return write_kitchens(tmp_path_factory.mktemp("kitchens"), train=4, val=3, length=24)


def config(folder, data, **changes):
    changes = {
        "TRAIN__DATASET": "epickitchens",
        "TEST__DATASET": "Epickitchens",
        "MODEL__NUM_CLASSES": VERBS,
        "EPICKITCHENS__NUM_NOUNS": NOUNS,
        **changes,
    }
    return load_config(write_config(folder / "c.yaml", data, folder, **changes))


def test_paths_and_labels(tmp_path, kitchens):
    cfg = config(tmp_path, kitchens)
    assert dataset_class(cfg, "TRAIN") is Epickitchens
    train, test = Epickitchens(cfg, "train"), Epickitchens(cfg, "test")
    assert train.labels == [(0, 0), (1, 1), (2, 2), (0, 3)]
    folder = kitchens / "P01" / "rgb_frames" / "P01_101"
    assert train.paths[1] == f"{folder}/frame_0000000025-0000000048.jpg"
    frames = train.video_path(1)
    assert len(frames) == 24 and frames.fps == 50 and test.video_path(0).fps == 60
    assert frames[0] == f"{folder}/frame_0000000025.jpg"
    assert frames[-1] == f"{folder}/frame_0000000048.jpg"
    assert (
        len(Epickitchens(config(tmp_path, kitchens, EPICKITCHENS__TRAIN_PLUS_VAL=True), "train"))
        == 7
    )


def test_timestamps_instead_of_frame_numbers(tmp_path, kitchens):
    """Columns in another order, and no frame numbers: the same frames."""
    columns = [name for name in reversed(COLUMNS) if not name.endswith("_frame")]
    for split, video, count in (("train", "P01_101", 4), ("validation", "P02_03", 3)):
        rows = [action_row(video, i, 24 * i, 24 * i + 24, 1, 2) for i in range(count)]
        write_annotations(tmp_path / f"EPIC_100_{split}.csv", rows, columns)
    changes = {"EPICKITCHENS__VISUAL_DATA_DIR": str(kitchens)}
    for mode in ("train", "val"):
        found = Epickitchens(config(tmp_path, tmp_path, **changes), mode)
        assert found.paths == Epickitchens(config(tmp_path, kitchens), mode).paths


def test_a_clip_spans_the_right_time(tmp_path):
    """NUM_FRAMES * SAMPLING_RATE frames at TARGET_FPS, here of a video of 60 fps, centred."""
    start, stop = 10, 70
    write_annotations(
        tmp_path / "EPIC_100_validation.csv", [action_row("P01_01", 0, start, stop, 0, 0)]
    )
    for number in range(start + 1, stop + 1):
        path = tmp_path / f"P01/rgb_frames/P01_01/frame_{number:010d}.jpg"
        write_frame(path, 2 * number, 0)
    cfg = config(tmp_path, tmp_path, DATA__SAMPLING_RATE=5)
    sample = Epickitchens(cfg, "val")[0]
    # A clip is 4 * 5 * 60 / 30 = 40 of the 60 frames.
    indices = clip_indices(60, 40, 4, 0.5, 1)
    folder = tmp_path / "P01/rgb_frames/P01_01"
    images = [read_image(f"{folder}/frame_{start + 1 + i:010d}.jpg") for i in indices]
    brightness = np.array([image.mean() for image in images]) / 255
    found = sample.clip.mean(dim=(0, 2, 3)).numpy() * cfg.DATA.STD[0] + cfg.DATA.MEAN[0]
    assert found == pytest.approx(brightness, abs=0.01) and sample.label == (0, 0)


def test_pickles_are_not_read(tmp_path, kitchens):
    """A config may name them: the CSV file of the same name is read instead."""

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    (tmp_path / "EPIC_100_train.pkl").write_bytes(pickle.dumps(Bomb()))
    names = {f"EPICKITCHENS__{x}_LIST": "EPIC_100_train.pkl" for x in ("TRAIN", "VAL", "TEST")}
    cfg = config(tmp_path, tmp_path, EPICKITCHENS__VISUAL_DATA_DIR=str(kitchens), **names)
    with pytest.raises(DataError, match="EPIC_100_train.csv: .*CSV.*not the .pkl.*https://"):
        Epickitchens(cfg, "train")
    (tmp_path / "EPIC_100_train.csv").write_bytes((kitchens / "EPIC_100_train.csv").read_bytes())
    assert len(Epickitchens(cfg, "train")) == 4
    assert not (tmp_path / "executed").exists()


GOOD = action_row("P01_101", 0, 0, 5, 0, 0)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"verb_class": ""}, "line 2.*verb_class"),
        ({"verb_class": "two"}, "line 2.*'two'"),
        ({"verb_class": VERBS}, "line 2.*0 to 2.*MODEL.NUM_CLASSES is 3"),
        ({"noun_class": NOUNS}, "line 2.*0 to 3.*EPICKITCHENS.NUM_NOUNS is 4"),
        ({"video_id": ""}, "line 2.*video_id"),
        ({"start_frame": "x"}, "line 2.*start_frame"),
        ({"stop_frame": 0}, "line 2.*0 to 0"),
        ({"start_frame": -1}, "line 2.*-1 to 5"),
        ({"start_frame": "", "start_timestamp": "1:2"}, "line 2.*start_timestamp"),
        ({"start_frame": "", "start_timestamp": "00:00:inf"}, "line 2.*start_timestamp"),
        ({"start_frame": "", "start_timestamp": ""}, "line 2.*start_timestamp"),
    ],
)
def test_invalid_rows(tmp_path, change, words):
    write_annotations(tmp_path / "EPIC_100_train.csv", [{**GOOD, **change}])
    with pytest.raises(DataError, match=words) as caught:
        Epickitchens(config(tmp_path, tmp_path), "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"video_id,verb_class\n", "no actions"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"something,else\n1,2\n", "line 2.*EPIC_100_train.csv"),
        (b"video_id\n" + b"x" * 200_000, "line 2"),
    ],
)
def test_invalid_files(tmp_path, content, words):
    (tmp_path / "EPIC_100_train.csv").write_bytes(content)
    with pytest.raises(DataError, match=words):
        Epickitchens(config(tmp_path, tmp_path), "train")


def test_missing_frames(tmp_path, kitchens):
    """All of them: an error names the key. One: that action fails."""
    for split in ("train", "validation"):
        text = (kitchens / f"EPIC_100_{split}.csv").read_text()
        (tmp_path / f"EPIC_100_{split}.csv").write_text(text)
    with pytest.raises(DataError, match="EPICKITCHENS.VISUAL_DATA_DIR is ''.*frame_0000000001"):
        Epickitchens(config(tmp_path, tmp_path), "train")
    write_frame(tmp_path / "P02/rgb_frames/P02_03/frame_0000000001.jpg", 0, 0)
    video = Epickitchens(config(tmp_path, tmp_path), "test")[0]
    assert video.views is None and "no such file" in video.error


def test_ranges_of_frames():
    frames = FrameRange("a/P01_01", 9, 12)
    assert str(frames) == "a/P01_01/frame_0000000009-0000000012.jpg"
    again = FrameRange.parse(str(frames))
    assert list(again) == list(frames) and again.fps == 60 and len(again) == 4
    assert list(frames[1:3]) == ["a/P01_01/frame_0000000010.jpg", "a/P01_01/frame_0000000011.jpg"]
    assert list(FrameRange.parse("a/frame_0000000007-0000000007.jpg")) == ["a/frame_0000000007.jpg"]
    for other in ("a.jpg", "frame_0000000009.jpg", "frame_0000000009-0000000008.jpg"):
        assert FrameRange.parse(other) is None
    assert FrameRange("a/other", 1, 2).fps is None
    with pytest.raises(IndexError):
        frames[4]


def test_class_names(kitchens, tmp_path):
    expected = [f"verb {i}" for i in range(VERBS)] + [f"noun {i}" for i in range(NOUNS)]
    assert names_in(str(kitchens), VERBS + NOUNS) == expected
    with pytest.raises(DataError, match="3 verbs and 4 nouns.*8 classes"):
        names_in(str(kitchens), VERBS + NOUNS + 1)
    for part in ("verb", "noun"):
        (tmp_path / f"EPIC_100_{part}_classes.csv").write_text("id,key\n1,a\n")
    with pytest.raises(DataError, match="ids"):
        names_in(str(tmp_path), 2)


def test_a_range_and_a_folder_are_videos_for_load_views(tmp_path, kitchens):
    cfg = config(tmp_path, kitchens)
    dataset = Epickitchens(cfg, "test")
    views = Epickitchens.read_views(dataset.paths[1], cfg)
    assert views.equal(dataset[1].views)
    folder = Epickitchens.read_views(str(kitchens / "P02/rgb_frames/P02_03"), cfg)
    assert folder.shape == views.shape and not folder.equal(views)
    with pytest.raises(DecodeError):
        Epickitchens.read_views(dataset.paths[1].replace("P02_03", "P02_04"), cfg)
