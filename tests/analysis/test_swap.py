"""`slowfast-lara swap`: a table of the accuracies of tests with other attentions."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from slowfast_lara.attention.performer import PerformerAttention
from slowfast_lara.models.motionformer import VisionTransformer
from tests.helpers.commands import run, swap
from tests.helpers.runs import write_config
from tests.helpers.small_models import only_error

pytestmark = pytest.mark.usefixtures("in_process")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, video_set):
    folder = tmp_path_factory.mktemp("trained")
    changes = {"SOLVER__MAX_EPOCH": 1, "VIT__APPROX_ATTN_DIM": 4, "VIT__ATTN_DROPOUT": 0.1}
    config = write_config(folder / "c.yaml", video_set, folder / "out", **changes)
    assert run(["--cfg", str(config)]) == 0
    return folder / "out"


def test_rows_equal_tests_with_those_attentions(trained, video_set, tmp_path, capsys):
    out = tmp_path / "table"
    command = [
        str(trained),
        "--attentions",
        "lara",
        "performer",
        "ra",
        "--landmarks",
        "3",
        "8",
        "9",
    ]
    assert swap([*command, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "skipped lara with 9: the clip has 8 tokens" in printed
    lines = (tmp_path / "table.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [(row["attention"], row["landmarks"]) for row in rows] == [
        ("exact (as trained)", ""),
        *(("lara", "3"), ("lara", "8")),
        *(("performer", "3"), ("performer", "8"), ("performer", "9")),
        ("ra", ""),
    ]
    own = json.loads((trained / "test_results.json").read_text())
    assert float(rows[0]["top-1, %"]) == round(own["top1_acc"], 1)
    assert rows[0]["same top-1, %"] == "100.0"
    for row in rows[1:3]:
        changes = {
            "TRAIN__ENABLE": False,
            "TEST__CHECKPOINT_FILE_PATH": own["checkpoint"],
            "VIT__APPROX_ATTN_TYPE": row["attention"],
            "VIT__APPROX_ATTN_DIM": int(row["landmarks"]),
        }
        folder = tmp_path / row["landmarks"]
        config = write_config(tmp_path / "c.yaml", video_set, folder, **changes)
        assert run(["--cfg", str(config)]) == 0
        test = json.loads((folder / "test_results.json").read_text())
        assert float(row["top-1, %"]) == round(test["top1_acc"], 1)
        assert float(row["top-5, %"]) == round(test["top5_acc"], 1)
        predicted, as_trained = (
            np.array([video["top5"][0] for video in results["videos"]]) for results in (test, own)
        )
        same = np.mean(predicted == as_trained)
        assert float(row["same top-1, %"]) == pytest.approx(100 * same, abs=0.051)
    assert all(float(row["ms per view"]) > 0 for row in rows)
    assert np.asarray(Image.open(f"{out}.png")).std() > 1


def test_some_videos_and_views(trained, capsys):
    names = ["nystrom", "lara-recommended"]
    assert swap([str(trained), "--attentions", *names, "--videos", "2", "--views", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["exact", *names]
    assert rows[1][2] in ("0.0", "50.0", "100.0")


def test_scores_that_are_not_finite_count_as_wrong(trained, capsys, monkeypatch):
    original = PerformerAttention.forward

    def forward(*args, **options):
        return original(*args, **options) * math.nan

    monkeypatch.setattr(PerformerAttention, "forward", forward)
    flags = ["--attentions", "performer", "--landmarks", "4", "--videos", "3", "--views", "1"]
    assert swap([str(trained), *flags]) == 0
    text = capsys.readouterr().out
    assert "performer with 4: the scores of 3 videos are not finite and count as wrong" in text
    assert text.splitlines()[-1].split()[:5] == ["performer", "4", "0.0", "0.0", "0.0"]


def test_videos_without_finite_scores_have_no_class_in_common(trained, capsys, monkeypatch):
    scores = torch.full((1, 3), math.nan)
    monkeypatch.setattr(VisionTransformer, "forward", lambda *_: scores)
    flags = ["--attentions", "performer", "--landmarks", "4", "--videos", "2", "--views", "1"]
    assert swap([str(trained), *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:5] == [
        "performer", "4", "0.0", "0.0", "0.0",
    ]  # fmt: skip


def test_untrained_parameters_are_noted_once(trained, capsys):
    """`exact`, the display name of softmax attention, is accepted too."""
    names, numbers = ["exact", "performer", "lara"], ["--landmarks", "5", "6"]
    few = ["--videos", "1", "--views", "1", "VIT.LARA.LEARNED", "True"]
    checkpoint = str(next(trained.glob("checkpoints/*.pyth")))
    assert swap(["--checkpoint", checkpoint, "--attentions", *names, *numbers, *few]) == 0
    printed = capsys.readouterr().out
    assert printed.count("performer: not trained, drawn from the seed: blocks.0.attn.") == 1
    assert "skipped lara with 5" in printed
    assert [line.split()[0] for line in printed.splitlines()[-3:]] == ["exact", *["performer"] * 2]


def test_bad_input(trained, tmp_path, capsys):
    for arguments, mention in (
        ([str(tmp_path)], "no readable checkpoint"),
        ([str(trained), "--attentions", "lora"], "unknown attention 'lora'"),
        ([str(trained), "video.mp4"], "'video.mp4' is neither a run nor a config key"),
        ([str(trained), "--views", "31"], "views is 31"),
        ([str(trained), "DATA.PATH_TO_DATA_DIR", "nowhere"], "nowhere"),
    ):
        assert swap(arguments) == 2, mention
        assert mention in only_error(capsys)
