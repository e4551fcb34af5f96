from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.data import load_views
from slowfast_lara.data.frame_lists import HEADER
from slowfast_lara.data.ssv2 import PREFIX, Ssv2
from slowfast_lara.errors import DataError
from tests.helpers.datasets import TEMPLATES, write_annotations
from tests.helpers.videos import config, decode_all, write_image, write_video


@pytest.fixture
def webm(tmp_path):
    """The official form: JSON files and a folder of videos."""
    write_annotations(tmp_path, train=[("11", 0), ("12", 1)], validation=[("13", 1)])
    (tmp_path / "videos").mkdir()
    for name in ("11", "12", "13"):
        write_video(
            tmp_path / "videos" / f"{name}.webm",
            30,
            codec="libvpx-vp9",
            fps=12,
            options={"deadline": "realtime", "cpu-used": "8"},
        )
    return config(
        TRAIN__DATASET="Ssv2",
        TEST__DATASET="Ssv2",
        MODEL__NUM_CLASSES=2,
        DATA__PATH_TO_DATA_DIR=str(tmp_path),
        DATA__PATH_PREFIX=str(tmp_path / "videos"),
    )


def test_videos_without_lists(webm):
    train = Ssv2(webm, "train")
    assert train.labels == [0, 1]
    assert train.paths == [f"{webm.DATA.PATH_PREFIX}/{name}.webm" for name in ("11", "12")]
    assert train[(1, 0)].clip.shape == (3, 8, 32, 32)
    test = Ssv2(webm, "test")
    assert test.labels == [1]
    assert torch.equal(test[0].views, load_views(test.paths[0], webm))


def test_prepared_videos(webm):
    """`slowfast-lara data prepare` writes mp4 files."""
    for path in Path(webm.DATA.PATH_PREFIX).iterdir():
        path.rename(path.with_suffix(".mp4"))
    train = Ssv2(webm, "train")
    assert train.paths == [f"{webm.DATA.PATH_PREFIX}/{name}.mp4" for name in ("11", "12")]
    assert train[(1, 0)].clip.shape == (3, 8, 32, 32)


def test_frames_and_their_lists(synthetic_frames):
    cfg = config(
        TRAIN__DATASET="Ssv2",
        TEST__DATASET="Ssv2",
        MODEL__NUM_CLASSES=5,
        DATA__PATH_TO_DATA_DIR=str(synthetic_frames),
    )
    sizes = {mode: len(Ssv2(cfg, mode)) for mode in ("train", "val", "test")}
    assert sizes == {"train": 20, "val": 7, "test": 6}
    test = Ssv2(cfg, "test")
    assert torch.equal(test[2].views, load_views(test.paths[2], cfg))
    (copy := synthetic_frames.parent / "no_test_list").mkdir(exist_ok=True)
    for path in synthetic_frames.iterdir():
        if path.is_file() and path.name != "test.csv":
            shutil.copy(path, copy)
    cfg.DATA.PATH_TO_DATA_DIR, cfg.DATA.PATH_PREFIX = str(copy), str(synthetic_frames)
    assert Ssv2(cfg, "test").paths == Ssv2(cfg, "val").paths
    # Paths in the lists are relative to the dataset's folder, not to its folder of frames.
    cfg.DATA.PATH_PREFIX = str(synthetic_frames / "frames")
    looked_for = f"{synthetic_frames}/frames/frames/1/1_000001.jpg"
    with pytest.raises(DataError, match=f"DATA.PATH_PREFIX is .* the first is {looked_for}"):
        Ssv2(cfg, "train")


def test_frames_are_taken_from_the_segments(webm):
    """Random frames of the segments in training, the central ones in validation."""
    webm.DATA.PATH_PREFIX = str(webm.DATA.PATH_PREFIX)
    webm.DATA.MEAN, webm.DATA.STD = [0.0] * 3, [1.0] * 3
    webm.DATA.TRAIN_CROP_SIZE, webm.DATA.TRAIN_JITTER_SCALES = 48, [48, 48]
    train, val = Ssv2(webm, "train"), Ssv2(webm, "val")
    frames = [frame[:, 8:56] for frame in decode_all(val.paths[0])[0]]

    def indices(clip, frames):
        clip = (clip * 255).round().byte().permute(1, 2, 3, 0).numpy()
        return [
            min(
                range(len(frames)),
                key=lambda index: np.abs(frames[index][:8].astype(int) - frame[:8]).mean(),
            )
            for frame in clip
        ]

    assert indices(val[0].clip, frames) == [int((i + 0.5) * 30 / 8) for i in range(8)]
    drawn = set()
    for epoch in range(20):
        picked = indices(
            train[(epoch, 0)].clip, [frame[:, :48] for frame in decode_all(train.paths[0])[0]]
        )
        assert all(int(i * 30 / 8) <= index < (i + 1) * 30 / 8 for i, index in enumerate(picked))
        drawn.add(tuple(picked))
    assert len(drawn) == 20


def test_clips_are_never_mirrored(tmp_path):
    path = write_video(tmp_path / "a.mp4", 8, size=(32, 32))
    (tmp_path / "train.csv").write_text(f"{path} 0\n")  # no JSON: a list as for Kinetics
    cfg = config(
        DATA__PATH_TO_DATA_DIR=str(tmp_path),
        DATA__TRAIN_JITTER_SCALES=[32, 32],
        DATA__RANDOM_FLIP=True,
    )
    dataset = Ssv2(cfg, "train")
    assert len({dataset[(e, 0)].clip.numpy().tobytes() for e in range(20)}) == 1


def test_paths_with_spaces_and_frames_out_of_order(tmp_path):
    write_annotations(tmp_path, train=[("7", 1), ("8", 0)])
    rows = ['7 0 1 a b/7_2.jpg ""', '7 0 0 a b/7_1.jpg ""', '7 0 10 a b/7_11.jpg ""']
    (tmp_path / "train.csv").write_bytes("\r\n".join([HEADER, *rows]).encode())
    folder = tmp_path / "f" / "a b"
    folder.mkdir(parents=True)
    (folder / "7_1.jpg").touch()
    prefix = str(tmp_path / "f")
    dataset = Ssv2(config(DATA__PATH_TO_DATA_DIR=str(tmp_path), DATA__PATH_PREFIX=prefix), "train")
    assert dataset.paths == [str(folder)] and dataset.labels == [1]
    assert dataset.video_path(0) == [f"{folder}/{name}.jpg" for name in ("7_1", "7_2", "7_11")]


@pytest.mark.parametrize(
    "file, content, expected",
    [
        ("train.csv", "7.webm 1\n", "train.csv, line 1: expected the header 'original_vido_id"),
        ("train.csv", HEADER + "\n7 0 0\n", "train.csv, line 2: expected 'original_vido_id"),
        ("train.csv", HEADER + '\n7 0 x a.jpg ""\n', "train.csv, line 2"),
        ("train.csv", HEADER + "\n", "train.csv: no frames below"),
        ("train.csv", HEADER + '\n9 0 0 a.jpg ""\n', "none of its videos"),
        (
            "train.csv",
            HEADER + '\n7 0 0 a ""\n8 0 0 a ""\n7 0 1 a ""\n',
            "video 7 must be consecutive",
        ),
        (f"{PREFIX}train.json", "[\n{,}]", "train.json, line 2: not JSON"),
        (f"{PREFIX}train.json", "{}", "expected a list of videos"),
        (f"{PREFIX}train.json", "[]", "empty"),
        (
            f"{PREFIX}train.json",
            '[{"id": "7"}]',
            'entry 1: expected an object with "id" and "template"',
        ),
        (f"{PREFIX}train.json", '[{"id": "7", "template": "No"}]', "entry 1: template 'No'"),
        (f"{PREFIX}labels.json", "[]", "labels.json, line 1: expected an object"),
        (
            f"{PREFIX}labels.json",
            json.dumps(dict.fromkeys(TEMPLATES, "12")),
            "label 12; must be 0 to 11",
        ),
        (f"{PREFIX}labels.json", json.dumps(dict.fromkeys(TEMPLATES, "x")), "class number"),
    ],
)
def test_invalid_lists_and_annotations(tmp_path, file, content, expected):
    write_annotations(tmp_path, train=[("7", 1), ("8", 0)])
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError) as caught:
        Ssv2(config(DATA__PATH_TO_DATA_DIR=str(tmp_path)), "train")
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_missing_annotations(tmp_path):
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path))
    with pytest.raises(DataError, match="labels.json"):
        Ssv2(cfg, "train")
    (tmp_path / "train.csv").write_text(HEADER + '\n7 0 0 a.jpg ""\n')
    with pytest.raises(DataError, match="labels.json"):
        Ssv2(cfg, "train")


def test_paths_relative_to_the_working_directory(tmp_path, monkeypatch):
    """The first video is missing; the second one is in the working directory."""
    write_annotations(tmp_path, train=[("7", 1), ("8", 0)])
    (tmp_path / "elsewhere" / "8").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("8.mp4", "8/1.jpg"):
        Path(name).touch()
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path))
    assert Ssv2(cfg, "train").paths == ["7.mp4", "8.mp4"]
    (tmp_path / "train.csv").write_text(HEADER + '\n7 0 0 7/1.jpg ""\n8 0 0 8/1.jpg ""\n')
    assert Ssv2(cfg, "train").paths == ["7", "8"]


def test_a_missing_frame(tmp_path):
    write_annotations(tmp_path, train=[], validation=[("7", 1), ("8", 1)])
    (tmp_path / "val.csv").write_text(HEADER + '\n7 0 0 absent.jpg ""\n8 0 0 8.jpg ""\n')
    write_image(tmp_path / "8.jpg")
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path), TEST__DATASET="Ssv2")
    dataset = Ssv2(cfg, "test")
    assert "absent.jpg: no such file" in dataset[0].error and dataset[1].error is None


def test_a_list_of_folders(tmp_path):
    """`path label` lists may contain folders of frames; tests read them like `load_views`."""
    (tmp_path / "frames").mkdir()
    write_image(tmp_path / "frames" / "1.png")
    (tmp_path / "test.csv").write_text("frames 3\n")
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path), TEST__DATASET="Ssv2")
    video = Ssv2(cfg, "test")[0]
    assert torch.equal(video.views, load_views(tmp_path / "frames", cfg)) and video.label == 3
