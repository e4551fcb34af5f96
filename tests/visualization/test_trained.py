"""predict and visualize on a trained model: the quick config with exact attention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slowfast_lara.data.sampling import clip_indices
from tests.helpers.commands import visualize
from tests.helpers.small_models import ROOT

pytestmark = pytest.mark.slow

VIDEO_SIZE, VIDEO_FRAMES, CROP = 80, 16, 64
TOKEN_FRAMES = 4


def run_tool(*command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    made = run_tool(
        ROOT / "datasets" / "make_synthetic.py",
        folder,
        "--classes",
        4,
        "--train",
        2048,
        "--val",
        64,
        "--test",
        64,
        "--size",
        VIDEO_SIZE,
        "--frames",
        VIDEO_FRAMES,
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def trained(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a trained model: config and last checkpoint of its run."""
    run = tmp_path_factory.mktemp("run")
    done = run_tool(
        ROOT / "tools" / "run_net.py",
        "--cfg",
        ROOT / "configs/quick/softmax.yaml",
        "DATA.PATH_TO_DATA_DIR",
        videos,
        "OUTPUT_DIR",
        run,
    )
    assert done.returncode == 0, done.stderr
    newest = sorted((run / "checkpoints").glob("checkpoint_*.pyth"))[-1]
    return ["--cfg", str(run / "config.yaml"), "--checkpoint", str(newest)]


def labels_of(videos: Path) -> dict[str, int]:
    lines = (videos / "test.csv").read_text().splitlines()
    return {str(videos / path): int(label) for path, label in map(str.split, lines)}


def test_predict_is_right_for_most(trained, videos, tmp_path):
    labels, out = labels_of(videos), tmp_path / "p.json"
    names = json.loads((videos / "classes.json").read_text())
    done = run_tool(ROOT / "tools" / "predict.py", *trained, "--json", out, *labels)
    assert done.returncode == 0, done.stderr
    entries = json.loads(out.read_text())["videos"]
    right = [entry["top5_names"][0] == names[labels[entry["path"]]] for entry in entries]
    print(f"predict: {sum(right)} of {len(right)} right")
    assert len(right) == len(labels) and np.mean(right) > 0.5


def test_trajectories_follow_the_object(trained, videos, tmp_path):
    """The path of exact attention for the most moving point is near the object.

    Only frames that contain the whole object count: at an edge it wraps around, and has no
    centre.
    """
    tracks = json.loads((videos / "tracks.json").read_text())
    shown = clip_indices(VIDEO_FRAMES, 16, 8, 0, 1)
    centres, objects = [], []
    for path in list(labels_of(videos))[:48]:
        assert visualize([*trained, "--estimators", "softmax", "--out", str(tmp_path), path]) == 0
        (point,) = json.loads((tmp_path / "trajectories.json").read_text())["points"]
        centres.append(point["attention"]["softmax"]["path"])
        track = np.array(tracks[os.path.relpath(path, videos)])[shown] * CROP / VIDEO_SIZE
        objects.append(track.reshape(TOKEN_FRAMES, 2, 2))
    centres, objects = np.array(centres), np.array(objects)
    inside = (np.minimum(objects, CROP - objects) > 0.15 * CROP).all(axis=(2, 3))
    objects = objects.mean(axis=2)
    assert inside.sum() > 40
    to_object = np.linalg.norm(centres - objects, axis=2)
    to_middle = np.linalg.norm(centres - CROP / 2, axis=2)
    # Control: the tracks of other videos at the same frames.
    to_others = np.linalg.norm(centres[:, None] - objects[None], axis=3)
    to_others = to_others[np.broadcast_to(inside[None], to_others.shape)].mean()
    nearer = (to_object < to_middle)[inside].mean()
    print(
        f"to the object {to_object[inside].mean():.1f}, to the frame's centre "
        f"{to_middle[inside].mean():.1f}, to other videos' objects {to_others:.1f} pixels; "
        f"nearer to the object in {nearer:.0%} of {inside.sum()} frames"
    )
    assert to_object[inside].mean() < to_middle[inside].mean()
    assert nearer > 0.5
    assert to_object[inside].mean() < to_others
