"""Shared fixtures: videos, a small model, class names; cleanup of processes and signals."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path

import pytest
import torch

from tests.helpers.datasets import make_synthetic
from tests.helpers.runs import STARTED, kill_group, write_set
from tests.helpers.small_models import NAMES, ModelFiles, make_videos, small_config, write_model

# Folders with the slowest tests run first, so that parallel test processes end at the same time.
_FIRST = ("engine", "studies", "prepare", "data", "inference", "models", "plugin", "cli")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def priority(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _FIRST.index(folder) if folder in _FIRST else len(_FIRST)

    items.sort(key=priority)


@pytest.fixture(scope="session")
def video_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of lists and videos of noise."""
    return write_set(tmp_path_factory.mktemp("videos"), train=16, val=5, test=7)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the paths of synthetic videos."""
    folder = make_videos(tmp_path_factory.mktemp("set"), 4, "--frames", "20")
    return sorted(str(path) for path in (folder / "videos").glob("*.mp4"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return write_model(tmp_path_factory.mktemp("model"), small_config())


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("names") / "names.json"
    path.write_text(json.dumps(NAMES))
    return str(path)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: models are small, and test processes run in parallel."""
    torch.set_num_threads(1)


@pytest.fixture()
def in_process():
    """Restore signal handlers and logging after tests that call `main` in this process."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    root, level = logging.root.handlers, logging.root.level
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.root.handlers, logging.root.level = root, level


@pytest.fixture(autouse=True)
def nothing_left_running():
    yield
    while STARTED:
        kill_group(STARTED.pop())


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a synthetic set of videos of all 12 classes."""
    folder = tmp_path_factory.mktemp("synthetic")
    numbers = ("--classes", "12", "--train", "50", "--val", "13", "--test", "7")
    make_synthetic(folder, *numbers, "--size", "48", "--frames", "16", "--seed", "3")
    return folder


@pytest.fixture(scope="session")
def synthetic_frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a synthetic set of extracted frames, as for Something-Something-v2."""
    folder = tmp_path_factory.mktemp("synthetic_frames")
    numbers = ("--classes", "5", "--train", "20", "--val", "7", "--test", "6")
    make_synthetic(folder, *numbers, "--size", "48", "--frames", "20", "--form", "frames")
    return folder
