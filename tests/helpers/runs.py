"""Small video sets, configs of small models, and commands that run on them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import yaml

from slowfast_lara.runs.folder import read_stats
from tests.helpers.preloaded import Program, start_program

ROOT = Path(__file__).resolve().parents[2]
RUN_NET = str(ROOT / "tools" / "run_net.py")
MAKE_SYNTHETIC = str(ROOT / "datasets" / "make_synthetic.py")
NUM_CLASSES = 3
# The programs that a test has started; conftest.py ends them after the test.
STARTED: list[Program] = []
json_stats = read_stats


def write_video(
    path: Path, seed: int, frames: int = 12, size: int = 40, width: int | None = None
) -> None:
    """Write a video of noise that depends on the seed, square unless a width is given."""
    rng = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height = width or size, size
        stream.pix_fmt = "yuv420p"
        for picture in rng.integers(0, 255, (frames, size, stream.width, 3), dtype=np.uint8):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_set(folder: Path, *, train: int = 8, val: int = 3, test: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("val", val), ("test", test)):
        lines = []
        for i in range(count):
            path = folder / f"{split}{i}.mp4"
            write_video(path, seed={"train": 0, "val": 1000, "test": 2000}[split] + i)
            lines.append(f"{path} {i % NUM_CLASSES}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def copy_set(folder: Path, video_set: Path, *, repeat_train: int = 1) -> Path:
    """Copy a set: lists to `folder`, videos to `folder`/videos, which is returned."""
    videos = folder / "videos"
    shutil.copytree(video_set, videos)
    for split in ("train", "val", "test"):
        text = (video_set / f"{split}.csv").read_text().replace(str(video_set), str(videos))
        (folder / f"{split}.csv").write_text(text * (repeat_train if split == "train" else 1))
    return videos


def copy_lists(folder: Path, video_set: Path, **repeats: int) -> Path:
    """Copy the lists of a set to a new `folder`, each repeated `repeats[split]` times."""
    folder.mkdir()
    for split in ("train", "val", "test"):
        text = (video_set / f"{split}.csv").read_text()
        (folder / f"{split}.csv").write_text(text * repeats.get(split, 1))
    return folder


def write_config(path: Path, data: Path, output: Path, **changes: Any) -> Path:
    """Write a config of a model so small that a step takes milliseconds."""
    config: dict[str, Any] = {
        "TRAIN": {"DATASET": "kinetics", "BATCH_SIZE": 4, "EVAL_PERIOD": 2},
        "TEST": {"DATASET": "kinetics", "BATCH_SIZE": 4, "NUM_ENSEMBLE_VIEWS": 2},
        "DATA": {
            "PATH_TO_DATA_DIR": str(data),
            "NUM_FRAMES": 4,
            "SAMPLING_RATE": 2,
            "TRAIN_JITTER_SCALES": [36, 40],
            "TRAIN_CROP_SIZE": 32,
            "TEST_CROP_SIZE": 32,
        },
        "VIT": {
            "PATCH_SIZE": 16,
            "PATCH_SIZE_TEMP": 2,
            "TEMPORAL_RESOLUTION": 2,
            "EMBED_DIM": 24,
            "DEPTH": 2,
            "NUM_HEADS": 2,
            "IM_PRETRAINED": False,
        },
        "SOLVER": {"BASE_LR": 0.001, "MAX_EPOCH": 2, "OPTIMIZING_METHOD": "adamw"},
        "MODEL": {"NUM_CLASSES": NUM_CLASSES},
        "DATA_LOADER": {"NUM_WORKERS": 0},
        "LOG_PERIOD": 1,
        "NUM_GPUS": 0,
        "OUTPUT_DIR": str(output),
    }
    for key, value in changes.items():
        node, _, name = key.partition("__")
        if name:
            config.setdefault(node, {})[name] = value
        else:
            config[node] = value
    path.write_text(yaml.safe_dump(config))
    return path


def start(
    *arguments: Any, program: tuple[str, ...] = (RUN_NET,), folder: Path | None = None
) -> Program:
    """Start a command in a process group of its own, with `folder` as working directory."""
    STARTED.append(start_program([*program, *map(str, arguments)], folder))
    return STARTED[-1]


def finish(process: Program, seconds: float = 120) -> tuple[int, str, str]:
    """Wait for a program; return exit code, stdout and stderr, and kill its process group."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
        return process.returncode, stdout, stderr
    finally:
        kill_group(process)


def kill_group(process: Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_net(*arguments: Any, seconds: float = 120) -> tuple[int, str, str]:
    return finish(start(*arguments), seconds)


def run_ok(*arguments: Any) -> str:
    code, stdout, stderr = run_net(*arguments)
    assert code == 0, f"exit code {code}\n{stdout}\n{stderr}"
    return stdout


def load_checkpoint(output: Path, name: str) -> dict[str, Any]:
    return torch.load(output / "checkpoints" / name, weights_only=True)


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
