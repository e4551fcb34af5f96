"""Tests by many views: the scores, what is written, and videos that fail."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.commands.run import main
from slowfast_lara.config import load_config
from slowfast_lara.data import load_views
from slowfast_lara.engine.checkpoint import load_weights
from slowfast_lara.engine.evaluate import count_correct, score_views
from slowfast_lara.models import build_model
from tests.runs import json_stats, load_checkpoint, write_config

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, video_set):
    """The checkpoint of a short training."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "c.yaml", video_set, folder / "out", TEST__ENABLE=False)
    assert main(["--cfg", str(config)]) == 0
    return folder / "out" / "checkpoints" / "checkpoint_epoch_00002.pyth"


def run_test(folder, video_set, trained, *, code=0, **changes):
    output = folder / "out"
    changes = {
        "TRAIN__ENABLE": False,
        "TEST__CHECKPOINT_FILE_PATH": str(trained),
        "TEST__SAVE_RESULTS_PATH": "scores.npz",
        **changes,
    }
    config = write_config(folder / "c.yaml", video_set, output, **changes)
    assert main(["--cfg", str(config)]) == code
    return output, config


def test_scores_are_the_mean_over_the_views_one_by_one(tmp_path, video_set, trained):
    output, config = run_test(tmp_path, video_set, trained)
    cfg = load_config(config)
    model = build_model(cfg)
    load_weights(model, load_checkpoint(trained.parent.parent, trained.name)["model_state"], "")
    model.eval()
    results = json.loads((output / "test_results.json").read_text())
    saved = np.load(output / "scores.npz", allow_pickle=False)
    assert [video["path"] for video in results["videos"]] == saved["paths"].tolist()
    for i, video in enumerate(results["videos"]):
        views = load_views(video["path"], cfg)
        assert video["num_views"] == len(views) == 6 == saved["num_views"][i]
        with torch.no_grad():
            expected = sum(model([view[None]])[0].double() for view in views) / len(views)
        assert np.allclose(saved["scores"][i], expected, atol=1e-6)
        assert torch.allclose(score_views(model, views, cfg), expected.float(), atol=1e-6)
        order = np.argsort(-saved["scores"][i])
        assert video["top5"] == order.tolist()
        assert video["top5_scores"] == pytest.approx(saved["scores"][i][order].tolist())
        assert video["label"] == saved["labels"][i]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_scores_do_not_depend_on_the_global_generator(tmp_path, video_set, name):
    """What an estimator draws in a test comes from seeds of its own, and moves no other draw."""
    changes = {"VIT__APPROX_ATTN_TYPE": name, "VIT__APPROX_ATTN_DIM": 3}
    cfg = load_config(write_config(tmp_path / "c.yaml", video_set, tmp_path, **changes))
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    views = torch.randn(5, 3, 4, 32, 32)
    scores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        scores.append(score_views(model, views, cfg))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*scores)


def test_accuracies_are_those_of_the_scores(tmp_path, video_set, trained):
    output, _ = run_test(tmp_path, video_set, trained)
    results = json.loads((output / "test_results.json").read_text())
    saved = np.load(output / "scores.npz")
    right = saved["scores"].argmax(1) == saved["labels"]
    assert results["top1_acc"] == pytest.approx(100 * right.mean())
    assert results["top5_acc"] == 100  # of three classes
    for label in range(3):
        of_class = saved["labels"] == label
        per_class = results["per_class"][str(label)]
        assert per_class["num_videos"] == of_class.sum()
        assert per_class["top1_acc"] == pytest.approx(100 * right[of_class].mean())
    final = json_stats(output)[-1]
    assert final["split"] == "test_final"
    assert final["top1_acc"] == pytest.approx(results["top1_acc"], abs=1e-5)


def test_failed_videos_are_listed_and_not_counted(tmp_path, video_set, trained):
    lists = tmp_path / "lists"
    lists.mkdir()
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"not a video")
    lines = (video_set / "test.csv").read_text().splitlines()
    lines[2:2] = [f"{broken} 1", f"{tmp_path / 'missing.mp4'} 0"]
    (lists / "test.csv").write_text("\n".join(lines) + "\n")
    output, _ = run_test(tmp_path, lists, trained)
    results = json.loads((output / "test_results.json").read_text())
    assert [video["path"] for video in results["failed"]] == [
        str(broken),
        str(tmp_path / "missing.mp4"),
    ]
    assert all(video["reason"] for video in results["failed"])
    assert results["num_videos"] == 7 and results["num_failed"] == 2
    assert json_stats(output)[-1]["num_failed"] == 2
    whole, _ = run_test(tmp_path / "out", video_set, trained)
    assert json.loads((whole / "test_results.json").read_text())["videos"] == results["videos"]


def test_nothing_to_score_is_an_error(tmp_path, video_set, trained, capsys):
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "test.csv").write_text(f"{tmp_path / 'missing.mp4'} 0\n")
    output, _ = run_test(tmp_path, lists, trained, code=1)
    assert "missing.mp4" in capsys.readouterr().err
    assert not (output / "test_results.json").exists()


def test_last_checkpoint_of_the_run_is_tested(tmp_path, video_set, trained):
    target = tmp_path / "out" / "checkpoints"
    target.mkdir(parents=True)
    (target / "checkpoint_epoch_00001.pyth").write_bytes(trained.read_bytes())
    (target / "checkpoint_epoch_00002.pyth").write_bytes(trained.read_bytes()[:1000])
    output, _ = run_test(tmp_path, video_set, "")
    results = json.loads((output / "test_results.json").read_text())
    assert results["checkpoint"].endswith("checkpoint_epoch_00001.pyth")


def test_validation_does_not_count_failed_videos(tmp_path, video_set):
    lists = tmp_path / "lists"
    lists.mkdir()
    for split in ("train", "val", "test"):
        (lists / f"{split}.csv").write_text((video_set / f"{split}.csv").read_text())
    with open(lists / "val.csv", "a") as file:
        file.write(f"{tmp_path / 'missing.mp4'} 0\n" * 6)  # a whole batch of them
    output, _ = run_test(tmp_path, lists, "", TRAIN__ENABLE=True, TEST__ENABLE=False)
    stats = [s for s in json_stats(output) if s.get("_type") == "val_epoch"]
    assert [(s["num_videos"], s["num_failed"]) for s in stats] == [(5, 6)]
    whole, _ = run_test(output, video_set, "", TRAIN__ENABLE=True, TEST__ENABLE=False)
    assert (
        stats[0]["top1_err"]
        == [s["top1_err"] for s in json_stats(whole) if s.get("_type") == "val_epoch"][0]
    )


@pytest.mark.parametrize("classes", [1, 2, 4, 5, 7])
def test_top_five_of_any_number_of_classes(classes):
    scores = torch.rand(20, classes, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % classes
    ranks = [(row > row[label]).sum().item() for row, label in zip(scores, labels)]
    expected = (sum(r < 1 for r in ranks), sum(r < 5 for r in ranks))
    assert count_correct(scores, labels) == expected
