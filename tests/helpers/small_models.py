"""Synthetic videos, small models with random weights, and checks of their tools."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from slowfast_lara.config import load_config
from slowfast_lara.models import build_model
from slowfast_lara.runs import checkpoint
from tests.helpers.runs import MAKE_SYNTHETIC, finish, start

ROOT = Path(__file__).resolve().parents[2]
NUM_CLASSES = 6
# With characters that are special in HTML, CSV and matplotlib.
NAMES = ["left", "right", "up", 'down, "quoted"', "<b>bold</b> & $x$", "_größer"]


@dataclass(frozen=True)
class ModelFiles:
    cfg: str
    checkpoint: str

    def flags(self) -> list[str]:
        return ["--cfg", self.cfg, "--checkpoint", self.checkpoint]


def make_videos(folder: Path, count: int, *options: str) -> Path:
    """Synthetic videos: folder/videos/*.mp4 (or folder/frames/N)."""
    flags = f"--classes {NUM_CLASSES} --train 0 --val 0 --test {count} --size 48 --jobs 1".split()
    code, _, stderr = finish(start(folder, *flags, *options, program=(MAKE_SYNTHETIC,)))
    assert code == 0, stderr
    (folder / "classes.json").unlink()
    return folder


def small_config(**vit: Any) -> dict[str, Any]:
    return {
        "TRAIN": {"DATASET": "kinetics", "BATCH_SIZE": 4},
        "TEST": {
            "DATASET": "kinetics",
            "BATCH_SIZE": 8,
            "NUM_ENSEMBLE_VIEWS": 2,
            "NUM_SPATIAL_CROPS": 3,
        },
        "DATA": {
            "NUM_FRAMES": 4,
            "SAMPLING_RATE": 2,
            "TRAIN_JITTER_SCALES": [32, 40],
            "TRAIN_CROP_SIZE": 32,
            "TEST_CROP_SIZE": 32,
        },
        "VIT": {
            "PATCH_SIZE": 8,
            "PATCH_SIZE_TEMP": 2,
            "TEMPORAL_RESOLUTION": 2,
            "EMBED_DIM": 32,
            "DEPTH": 2,
            "NUM_HEADS": 2,
            "APPROX_ATTN_DIM": 8,
            "IM_PRETRAINED": False,
            "APPROX_ATTN_TYPE": "lara",
            **vit,
        },
        "MODEL": {"NUM_CLASSES": NUM_CLASSES},
        "NUM_GPUS": 0,
    }


def write_model(folder: Path, config: dict[str, Any], seed: int = 0) -> ModelFiles:
    """Write config and weights; the weights are large, so that scores and attention vary."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg_file, weights = folder / "model.yaml", folder / "model.pyth"
    cfg_file.write_text(yaml.safe_dump(config))
    torch.manual_seed(seed)
    model = build_model(load_config(cfg_file))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    checkpoint.save(str(weights), {"epoch": 0, "model_state": model.state_dict()})
    return ModelFiles(str(cfg_file), str(weights))


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files: larger writes fail as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def only_error(capsys: Any) -> str:
    """The one line on stderr, an error."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]
