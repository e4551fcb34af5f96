"""Synthetic sets: balanced classes, tracks, reproducibility, arguments."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import subprocess
import sys
import termios
from collections import Counter

import av
import numpy as np
import pytest

from slowfast_lara.prepare import synthetic
from slowfast_lara.prepare.synthetic import Settings, make_set
from tests.helpers.datasets import make_synthetic
from tests.helpers.runs import MAKE_SYNTHETIC, finish, start
from tests.helpers.videos import REPOSITORY, decode_all

SIZES = {"train": 50, "val": 13, "test": 7}


def read_list(path):
    return [line.rsplit(" ", 1) for line in path.read_text().splitlines()]


def test_balanced_and_decodable(synthetic):
    assert len(json.loads((synthetic / "classes.json").read_text())) == 12
    tracks = json.loads((synthetic / "tracks.json").read_text())
    paths = []
    for split, size in SIZES.items():
        rows = read_list(synthetic / f"{split}.csv")
        counts = Counter(int(label) for _, label in rows)
        assert len(rows) == size
        assert max(counts.values()) - min(counts.get(label, 0) for label in range(12)) <= 1
        paths += [path for path, _ in rows]
    assert len(set(paths)) == 70 and set(tracks) == set(paths)
    for path in paths:
        with av.open(str(synthetic / path)) as container:
            assert container.streams.video[0].codec_context.name == "h264"
            frames = list(container.decode(video=0))
        assert len(frames) == len(tracks[path]) == 16
        assert {(frame.width, frame.height) for frame in frames} == {(48, 48)}


@pytest.mark.parametrize("form", ["mp4", "frames"])
def test_links_are_replaced(tmp_path, form):
    precious, out = tmp_path / "precious", tmp_path / "out"
    precious.write_text("precious")
    name = "videos/train_000000.mp4" if form == "mp4" else "frames/1/1_000001.jpg"
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(precious)
    make_set(Settings(str(out), 2, {"train": 1, "val": 1, "test": 1}, 32, 4, 0, form), 1)
    assert precious.read_text() == "precious" and not (out / name).is_symlink()


def test_same_seed_same_lists(synthetic, tmp_path):
    files = [f"{split}.csv" for split in SIZES] + ["tracks.json", "classes.json"]
    arguments = [
        "--classes",
        "12",
        "--train",
        "50",
        "--val",
        "13",
        "--test",
        "7",
        "--size",
        "48",
        "--frames",
        "16",
    ]
    make_synthetic(tmp_path, *arguments, "--seed", "3", "--jobs", "1")
    for file in files:
        assert (tmp_path / file).read_bytes() == (synthetic / file).read_bytes()
    make_synthetic(tmp_path, *arguments, "--seed", "4")
    assert (tmp_path / "train.csv").read_bytes() != (synthetic / "train.csv").read_bytes()


def test_tracks_follow_the_object_and_the_class(tmp_path):
    """The object is at its track and moves as its class requires."""
    make_synthetic(
        tmp_path, "--classes", "4", "--train", "24", "--val", "0", "--test", "0", "--size", "96"
    )
    tracks = json.loads((tmp_path / "tracks.json").read_text())
    steps = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}
    for path, label in read_list(tmp_path / "train.csv"):
        track = np.array(tracks[path])
        assert (track >= 0).all() and (track <= 96).all()
        step = (np.diff(track, axis=0) + 48) % 96 - 48  # the short way round
        assert np.allclose(np.sign(step.round(1)), steps[int(label)])
        frames = np.stack(decode_all(tmp_path / path)[0]).astype(int)
        x, y = np.minimum(track.astype(int), 95).T
        numbers = np.arange(len(frames))
        object_colors = frames[numbers, y, x]
        elsewhere = frames[numbers, (y + 48) % 96, (x + 48) % 96]
        assert np.abs(object_colors - object_colors.mean(axis=0)).max() < 30
        assert np.abs(object_colors - elsewhere).mean(axis=1).min() > 25


def test_single_frames_do_not_reveal_the_class(tmp_path):
    """The distribution of positions in a frame does not depend on the class."""
    make_synthetic(
        tmp_path,
        "--classes",
        "8",
        "--train",
        "960",
        "--val",
        "0",
        "--test",
        "0",
        "--size",
        "16",
        "--frames",
        "16",
    )
    tracks = json.loads((tmp_path / "tracks.json").read_text())
    rows = read_list(tmp_path / "train.csv")
    for pair in ((0, 1), (2, 3), (4, 5), (6, 7)):
        for frame in (0, 8, 15):
            positions = [
                np.array([tracks[path][frame] for path, label in rows if int(label) == wanted])
                for wanted in pair
            ]
            spread = np.sqrt(sum(one.var(axis=0) / len(one) for one in positions))
            difference = np.abs(positions[0].mean(axis=0) - positions[1].mean(axis=0))
            assert (difference < 4 * spread).all()


def test_frames_form(synthetic_frames):
    header, *rows = (synthetic_frames / "val.csv").read_text().splitlines()
    assert header.startswith("original_vido_id") and len(rows) == 7 * 20
    assert all((synthetic_frames / row.split()[3]).is_file() for row in rows)
    entries = json.loads((synthetic_frames / "something-something-v2-train.json").read_text())
    labels = json.loads((synthetic_frames / "something-something-v2-labels.json").read_text())
    counts = Counter(
        labels[entry["template"].replace("[", "").replace("]", "")] for entry in entries
    )
    assert sorted(counts) == list("01234") and set(counts.values()) == {4}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--classes", "13"], "1 to 12"),
        (["--classes", "0"], "1 to 12"),
        (["--size", "33"], "even number"),
        (["--frames", "0"], "at least 1"),
        (["--train", "-1"], "at least 0"),
    ],
)
def test_invalid_arguments(tmp_path, arguments, expected):
    code, _, stderr = finish(start(tmp_path / "out", *arguments, program=(MAKE_SYNTHETIC,)))
    assert code == 2 and expected in stderr
    assert not (tmp_path / "out").exists()


def test_lists_of_other_videos_are_kept(tmp_path):
    (tmp_path / "val.csv").write_text("mine.mp4 0\n")
    code, _, stderr = finish(start(tmp_path, program=(MAKE_SYNTHETIC,)))
    assert code == 2 and f"{tmp_path}/val.csv is not of a synthetic set" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["val.csv"]


def test_progress_bar_only_on_a_terminal(tmp_path):
    command = [sys.executable, MAKE_SYNTHETIC, str(tmp_path / "a")]
    command += ["--train", "3", "--val", "1", "--test", "1", "--size", "16", "--jobs", "1"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert piped.stdout.startswith("5 videos of 4 classes") and piped.stderr == ""
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))  # tqdm draws no bar on a terminal without size
    os.set_blocking(screen, False)
    subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, check=True, timeout=600)
    assert b"/5 [" in os.read(screen, 100_000)
    os.close(terminal)
    os.close(screen)


def test_spawned_processes(tmp_path, monkeypatch):
    """Windows starts processes by spawn: settings and renderers are pickled."""
    spawn = multiprocessing.get_context("spawn")
    monkeypatch.setattr(synthetic, "process_context", lambda module: spawn)
    make_set(Settings(str(tmp_path), 4, {"train": 2, "val": 1, "test": 1}, size=16), 1)
    assert len(list((tmp_path / "videos").iterdir())) == 4


def test_pytorch_is_not_imported():
    code = "import sys, slowfast_lara.prepare.synthetic; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)
