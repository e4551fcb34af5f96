"""The stand-in for a checkout of PySlowFast: where it is, a config for it, running it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.runs import ROOT

CHECKOUT = ROOT / "tests" / "plugin" / "checkout"
PAGE = ROOT / "docs" / "pyslowfast.md"
CLASSES, FRAMES, CROP, VIEWS, VIDEOS = 3, 4, 32, 6, 3
MODEL: dict[str, Any] = {
    "DATA": {
        "NUM_FRAMES": FRAMES,
        "SAMPLING_RATE": 2,
        "DECODING_BACKEND": "pyav",
        "TRAIN_CROP_SIZE": CROP,
        "TEST_CROP_SIZE": CROP,
    },
    "MODEL": {"MODEL_NAME": "VisionTransformer", "ARCH": "slow", "NUM_CLASSES": CLASSES},
    "TRAIN": {"BATCH_SIZE": 4},
    "TEST": {"BATCH_SIZE": 4, "NUM_ENSEMBLE_VIEWS": 2, "NUM_SPATIAL_CROPS": 3},
    "VIT": {
        "PATCH_SIZE": 8,
        "TEMPORAL_RESOLUTION": 2,
        "EMBED_DIM": 24,
        "DEPTH": 2,
        "NUM_HEADS": 2,
        "APPROX_ATTN_DIM": 5,
        "IM_PRETRAINED": False,
        "DROP_PATH": 0.2,
    },
    "SOLVER": {"OPTIMIZING_METHOD": "adamw", "BASE_LR": 0.01, "WEIGHT_DECAY": 0.05},
    "NUM_GPUS": 0,
    "RNG_SEED": 5,
}
MIXUP = ["MIXUP.ENABLE", "True", "MODEL.LOSS_FUNC", "soft_cross_entropy"]


def checkout_run(*words: str, cwd: Path = CHECKOUT) -> subprocess.CompletedProcess:
    """Run Python in a checkout, with its `slowfast` before the installed one on the path."""
    path = os.pathsep.join([str(cwd), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True
    )
