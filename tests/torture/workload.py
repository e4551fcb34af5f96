"""The workload: a few videos, a config with all random parts, and reference results."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.runs import write_config, write_set

TRAIN_VIDEOS, VAL_VIDEOS, TEST_VIDEOS = 24, 5, 24
EPOCHS = 6
CHECKPOINT_ITERATIONS = 3
GLOBAL_BATCH = 2
LAST = f"checkpoint_epoch_{EPOCHS:05d}.pyth"
SCORES = "scores.npz"
SETTINGS: dict[str, Any] = {
    "TRAIN__BATCH_SIZE": GLOBAL_BATCH,
    "TRAIN__CHECKPOINT_ITERATIONS": CHECKPOINT_ITERATIONS,
    "TRAIN__CHECKPOINT_KEEP": 4,
    "TRAIN__CHECKPOINT_BEST": True,
    "TRAIN__EVAL_PERIOD": 2,
    "SOLVER__MAX_EPOCH": EPOCHS,
    "SOLVER__SMOOTHING": 0.2,
    "SOLVER__CLIP_GRAD": 1.0,
    "VIT__DROP_PATH": 0.3,
    "VIT__DROP": 0.1,
    "VIT__APPROX_ATTN_TYPE": "lara",
    "VIT__APPROX_ATTN_DIM": 3,
    "TEST__NUM_ENSEMBLE_VIEWS": 3,
    "TEST__SAVE_RESULTS_PATH": SCORES,
    "DATA__MAX_BAD_SHARE": 0.1,
    "DATA_LOADER__NUM_WORKERS": 2,
}


@dataclass(frozen=True)
class Reference:
    """Results of an undisturbed run."""

    checkpoints: dict[str, str]  # digests by file name
    best: str
    scores: dict[str, np.ndarray]  # by video file name


def write_videos(folder: Path) -> Path:
    return write_set(folder, train=TRAIN_VIDEOS, val=VAL_VIDEOS, test=TEST_VIDEOS)


def config_file(path: Path, data: Path, output: Path, **changes: Any) -> Path:
    return write_config(path, data, output, **{**SETTINGS, **changes})


def read_reference(output: Path) -> Reference:
    """Read a run that has kept all its checkpoints, one per iteration."""
    folder = output / "checkpoints"
    names = [name for name in os.listdir(folder) if name.startswith("checkpoint")]
    digests = {name: content_digest(read_checkpoint(folder / name)) for name in names}
    return Reference(
        digests, content_digest(read_checkpoint(folder / "best.pyth")), read_scores(output)
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def content_digest(content: dict[str, Any]) -> str:
    """Return a digest of weights, optimiser and position; not of the config, which may differ."""
    digest = hashlib.sha256(f"{content['epoch']} {content['iteration']}".encode())
    tensors = dict(content["model_state"])
    for number, state in content["optimizer_state"]["state"].items():
        tensors |= {f"{number} {name}": value for name, value in state.items()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def read_scores(output: Path) -> dict[str, np.ndarray]:
    with np.load(output / SCORES) as arrays:
        names = [os.path.basename(path) for path in arrays["paths"].tolist()]
        return dict(zip(names, arrays["scores"]))
