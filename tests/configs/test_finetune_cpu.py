"""The config that fine-tunes a small model on a CPU."""

from __future__ import annotations

import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.models import build_model
from slowfast_lara.runs import checkpoint
from tests.helpers.commands import run as main

pytestmark = pytest.mark.usefixtures("in_process")


def test_starts_from_the_checkpoint_of_a_quick_run(tmp_path, video_set):
    cfg = load_config("quick/lara")
    quick = build_model(cfg).state_dict()
    path, output = str(tmp_path / "quick.pyth"), str(tmp_path / "out")
    checkpoint.save(path, {"epoch": 2, "model_state": quick, "cfg": cfg.dump()})
    changes = ["DATA.PATH_TO_DATA_DIR", str(video_set), "MODEL.NUM_CLASSES", "3"]
    changes += ["TRAIN.CHECKPOINT_FILE_PATH", path, "OUTPUT_DIR", output, "SOLVER.MAX_EPOCH", "1"]
    still = ["SOLVER.BASE_LR", "1e-9", "SOLVER.WARMUP_START_LR", "1e-9"]
    assert main(["--cfg", "finetune/cpu", *changes, *still, "DATA_LOADER.NUM_WORKERS", "0"]) == 0
    tuned = checkpoint.load(checkpoint.best_path(output))["model_state"]
    for name, weight in quick.items():  # at this learning rate, only the classifier is new
        if not name.startswith("head."):
            torch.testing.assert_close(tuned[name], weight, atol=1e-6, rtol=0)
    assert load_config("finetune/cpu").NUM_GPUS == 0
