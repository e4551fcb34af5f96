"""Every attention learns to classify motions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.config import load_config
from tests.helpers.preloaded import environment
from tests.helpers.runs import ROOT, finish, json_stats, start

QUICK = ROOT / "configs" / "quick"
CLASSES = 4


@pytest.fixture(scope="module")
def motions(tmp_path_factory):
    """Write a synthetic set with seed 1, not that of the quickstart."""
    folder = tmp_path_factory.mktemp("motions")
    command = [
        ROOT / "datasets" / "make_synthetic.py",
        folder,
        "--classes",
        CLASSES,
        "--train",
        2048,
        "--val",
        64,
        "--test",
        64,
        "--size",
        64,
        "--seed",
        1,
    ]
    subprocess.run([sys.executable, *map(str, command)], check=True, env=environment())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_attention_learns(tmp_path, motions, name):
    code, stdout, stderr = finish(
        start(
            "--cfg",
            QUICK / f"{name}.yaml",
            "DATA.PATH_TO_DATA_DIR",
            motions,
            "OUTPUT_DIR",
            tmp_path,
        ),
        seconds=1800,
    )
    assert code == 0, stdout + stderr
    results = json.loads((tmp_path / "test_results.json").read_text())
    assert results["num_videos"] == 64 and results["videos"][0]["num_views"] == 30
    assert results["top1_acc"] >= 3 * 100 / CLASSES
    losses = [s["loss"] for s in json_stats(tmp_path) if s.get("_type") == "train_epoch"]
    assert losses[-1] < 0.5 * losses[0]


def test_there_is_a_quick_config_for_every_estimator():
    for name in ESTIMATORS:
        assert name == load_config(QUICK / f"{name}.yaml").VIT.APPROX_ATTN_TYPE
