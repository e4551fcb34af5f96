"""Damaged files give an error or a shorter video, never a hang, a crash or a leak."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from slowfast_lara.data import load_views
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.errors import DecodeError
from tests.helpers.videos import REPOSITORY, config, write_malformed, write_video

CFG = config(TEST__NUM_ENSEMBLE_VIEWS=2)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def malformed(tmp_path_factory):
    return write_malformed(tmp_path_factory.mktemp("malformed"))


def test_every_malformed_input(malformed, capfd):
    assert len(malformed) >= 200
    before, outcomes = open_files(), {}
    for path in malformed:
        start = time.monotonic()
        try:
            views = load_views(path, CFG)
            assert views.shape == (6, 3, 8, 32, 32) and bool(views.isfinite().all())
            outcomes[path] = "a short video"
        except DecodeError as error:
            assert str(error).startswith(path) and "\n" not in str(error)
            outcomes[path] = "an error"
        assert time.monotonic() - start < 30, path  # detects a hang
    assert open_files() == before
    assert set(outcomes.values()) == {"a short video", "an error"}
    never = (
        "zeros",
        "noise",
        "text",
        "list",
        "concat",
        "audio",
        "folder",
        "dangling",
        "fifo",
        "cut0.",
        "absent",
    )
    for path in malformed:
        if os.path.basename(path).startswith(never):
            assert outcomes[path] == "an error", path
    assert "".join(capfd.readouterr()) == ""


def test_training_on_malformed_inputs(malformed, tmp_path):
    whole = write_video(tmp_path / "whole.mp4")
    listed = [path for path in malformed if path]
    lines = [f"{path} 1\n" for path in listed] + [f"{whole} 2\n"] * len(listed)
    (tmp_path / "train.csv").write_text("".join(lines))
    before = open_files()
    dataset = Kinetics(config(DATA__PATH_TO_DATA_DIR=str(tmp_path)), "train")
    for index in range(len(listed)):
        sample = dataset[index]
        assert sample.clip.shape == (3, 8, 32, 32) and sample.index == index
        if sample.failures:
            assert sample.failures[0].path == listed[index]
            assert sample.failures[0].reason and listed[index] not in sample.failures[0].reason
    assert open_files() == before


def test_one_frame_is_a_short_video(tmp_path):
    views = load_views(write_video(tmp_path / "one.mp4", 1), CFG)
    assert bool((views == views[:, :, :1]).all())


# In a separate process: the memory of other tests would distort the result.
MEMORY = """
import resource, sys
from slowfast_lara.data import load_views
from slowfast_lara.errors import DecodeError
from tests.helpers.videos import config
CFG = config(TEST__NUM_ENSEMBLE_VIEWS=2)
def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
paths, after_200 = sys.argv[1:], None
for number in range(2000):
    try:
        load_views(paths[number % len(paths)], CFG)
    except DecodeError:
        pass
    if number == 199:
        after_200 = used()
print(after_200, used())
"""


@pytest.mark.slow
def test_memory_after_2000_decodes(malformed):
    command = [sys.executable, "-c", MEMORY, *malformed]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        cwd=REPOSITORY,
        env=environment,
    )
    after_200, after_2000 = map(float, result.stdout.split())
    assert after_2000 < after_200 + 50


def test_memory_does_not_grow_with_the_length(tmp_path):
    """All frames of this video would take 280 MB."""
    path = write_video(tmp_path / "long.mp4", 300, size=(480, 640), options={"preset": "ultrafast"})
    script = (
        "import resource, sys; from slowfast_lara.data import load_views;"
        "from tests.helpers.videos import config; CFG = config(TEST__NUM_ENSEMBLE_VIEWS=2);"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024;"
        "before = peak(); load_views(sys.argv[1], CFG); print(peak() - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert float(result.stdout) < 100
