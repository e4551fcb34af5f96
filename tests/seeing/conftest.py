from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .helpers import NAMES, ModelFiles, make_videos, small_config, write_model


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
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


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
