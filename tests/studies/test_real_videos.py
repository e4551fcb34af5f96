"""`python -m studies videos`: fine-tuning on real videos, cross-validated by group."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from studies.__main__ import main
from studies.real_videos import VideoResult, linear_probe, video_groups, write_fold_lists
from tests.helpers.videos import write_video

CLASSES, SESSIONS = ("left", "right"), 4


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name in CLASSES:
        (folder / name).mkdir()
        for session in range(SESSIONS):
            write_video(folder / name / f"{name}_{session:03}.mp4", 12, size=(48, 48))
    return folder


def read_list(path: Path) -> list[tuple[str, int]]:
    lines = (line.rsplit(" ", 1) for line in path.read_text().splitlines())
    return [(video, int(label)) for video, label in lines]


def test_every_video_is_tested_once_and_no_session_is_on_both_sides(videos, tmp_path):
    groups = video_groups(str(videos), r"_(\d+)")
    assert write_fold_lists(str(videos), groups, 3, tmp_path) == 2
    tested = []
    for fold in range(3):
        train, val, test = (
            read_list(tmp_path / f"fold_{fold}" / f"{part}.csv")
            for part in ("train", "val", "test")
        )
        assert len(train) + len(test) == 8 and set(val) <= set(train)
        assert not {Path(p).stem[-3:] for p, _ in train} & {Path(p).stem[-3:] for p, _ in test}
        assert all(CLASSES[label] == Path(path).parent.name for path, label in train + test)
        tested += test
    assert len(set(tested)) == len(tested) == 8


def test_linear_probe_finds_a_direction_among_noise():
    torch.manual_seed(0)
    labels = torch.arange(120) % 3
    x = torch.randn(120, 40)
    x[:, :3] += 3 * torch.nn.functional.one_hot(labels, 3)
    groups = [str(index // 3 % 6) for index in range(90)]
    found = linear_probe(x[:90], labels[:90], x[90:], groups)
    assert (found == labels[90:]).float().mean() > 0.8
    shuffled = labels[torch.randperm(120)]
    chance = linear_probe(x[:90], shuffled[:90], x[90:], groups)
    assert (chance == shuffled[90:]).float().mean() < 0.7


def test_difference_is_paired_by_video():
    fold = np.array([0, 0, 1, 1])
    first = VideoResult("a", "swapped", np.array([True, True, True, False]), fold)
    second = VideoResult("b", "swapped", np.array([True, False, True, False]), fold)
    assert first.accuracy == 75 and first.fold_accuracies() == [100, 50]
    # Differences 0, 100, 0, 0: mean 25, standard deviation 50.
    assert first.difference(second) == pytest.approx((25, 25))


@pytest.mark.slow
def test_study(videos, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")  # of the extra hf
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Dinov2Config(**sizes, image_size=224, patch_size=14)
    transformers.Dinov2Model(config).save_pretrained(tmp_path / "model")
    flags = ["--group", r"_(\d+)", "--folds", "2", "--rows", "softmax", "merged", "--jobs", "2"]
    flags += ["--motions", "12", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    opts = {"SOLVER.MAX_EPOCH": 4, "TRAIN.EVAL_PERIOD": 4, "SOLVER.WARMUP_EPOCHS": 0.0}
    opts |= {"TRAIN.BATCH_SIZE": 2, "VIT.DEPTH": 1, "VIT.EMBED_DIM": 24, "VIT.NUM_HEADS": 2}
    words = [str(word) for pair in opts.items() for word in pair]
    arguments = ["videos", str(tmp_path / "model"), str(videos), *flags, "--opts", *words]
    assert main(arguments) == 0, capsys.readouterr().err
    with open(tmp_path / "videos.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    tuned = [row["attention"] for row in rows if row["training"] == "fine-tuned"]
    assert tuned == ["exact softmax", "merged keys"]
    swapped = {row["attention"]: row for row in rows if row["training"] == "swapped"}
    assert len(swapped) == 12 and sum(row["training"] == "frozen" for row in rows) == 2
    for row in rows:
        assert float(row["top1"]) == pytest.approx(
            (float(row["fold_0"]) + float(row["fold_1"])) / 2
        )
    exact = tmp_path / "work" / "exact" / "seed_0" / "test_results.json"
    accuracy = json.loads(exact.read_text())["top1_acc"]
    assert accuracy == pytest.approx(float(swapped["exact softmax"]["fold_0"]))
    # A finished study is not repeated: the same table.
    before = exact.stat().st_mtime_ns
    assert main(arguments) == 0 and exact.stat().st_mtime_ns == before


def test_unknown_row(videos, tmp_path, capsys):
    code = main(["videos", "model", str(videos), "--rows", "no", "--work", str(tmp_path)])
    assert code == 2 and "--rows" in capsys.readouterr().err
