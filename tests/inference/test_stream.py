"""Streams: windows equal clips scored alone; memory does not grow with the length."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import av
import numpy as np
import pytest
from PIL import Image

from slowfast_lara.config import load_config
from slowfast_lara.data import load_views
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.sources import at_constant_rate, open_frames
from slowfast_lara.inference.load import load
from slowfast_lara.inference.scoring import score_views
from slowfast_lara.inference.stream import Window, WindowScorer
from slowfast_lara.inference.timeline import Timeline
from tests.helpers.commands import predict as main
from tests.helpers.small_models import NAMES, ROOT, small_config, write_model
from tests.helpers.videos import decode_all
from tests.helpers.videos import write_video as write_noise

ONE_VIEW = ["TEST.NUM_ENSEMBLE_VIEWS", 1, "TEST.NUM_SPATIAL_CROPS", 1]


def write_video(path, frames: int, size: tuple[int, int] = (48, 64), fps: int = 30) -> str:
    """A bright bar that moves by one pixel per frame."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            image = np.full((*size, 3), 60, np.uint8)
            image[:, number % (size[1] - 8) :][:, :8] = (250, 180, number % 250)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


@pytest.mark.parametrize("dataset", ["kinetics", "ssv2"])
def test_window_equals_a_view(tmp_path, dataset):
    """A video as long as the window has one window, equal to the view of a one-view test."""
    config = small_config()
    config["TRAIN"]["DATASET"] = config["TEST"]["DATASET"] = dataset
    model = write_model(tmp_path, config)
    cfg = load_config(model.cfg, ONE_VIEW)
    network = load(model.cfg, model.checkpoint).network
    path = write_video(tmp_path / "v.mp4", 8)
    with open_frames(path) as (fps, frames):
        scorer = WindowScorer(network, cfg, fps, 8 / 30, 8 / 30)
        windows = [window for _, window in scorer.run(frames) if window]
    (window,) = windows
    expected = score_views(network, load_views(path, cfg), cfg)
    np.testing.assert_allclose(window.scores, expected, atol=1e-6)
    assert (window.start, window.end, window.full) == (0, 8 / 30, True)


def test_windows_of_a_long_video(model, names, tmp_path, capsys):
    """Each window has the scores of that part of the video alone."""
    path = write_video(tmp_path / "long.mp4", 53)
    table, out, plot = tmp_path / "s.csv", tmp_path / "s.json", tmp_path / "s.png"
    assert (
        main(
            [
                *model.flags(),
                "--classes",
                names,
                "--stream",
                "--stride",
                "0.5",
                path,
                "--csv",
                str(table),
                "--json",
                str(out),
                "--plot",
                str(plot),
            ]
        )
        == 0
    )
    windows = json.loads(out.read_text())["windows"]
    cfg = load_config(model.cfg, ONE_VIEW)
    assert dataset_class(cfg, "TEST").window_seconds(cfg) == 8 / 30
    ends = [8, 23, 38, 53]
    assert [round(window["end"] * 30) for window in windows] == ends
    assert [round(window["start"] * 30) for window in windows] == [end - 8 for end in ends]
    network = load(model.cfg, model.checkpoint).network
    with open_frames(path) as (_, frames):
        all_frames = list(frames)
    for window, end in zip(windows, ends):
        part = [frame.pixels for frame in all_frames[end - 8 : end]]
        scorer = WindowScorer(network, cfg, 30, 8 / 30, 8 / 30)
        (expected,) = [w for _, w in scorer.run(at_constant_rate(part, 30)) if w]
        best = np.argsort(-expected.scores, kind="stable")[:5]
        assert window["top5"] == best.tolist()
        np.testing.assert_allclose(window["top5_scores"], expected.scores[best], atol=1e-6)
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert len(rows) == 5 * len(ends)
    assert [row["name"] for row in rows[:5]] == [NAMES[i] for i in windows[0]["top5"]]
    assert capsys.readouterr().out.count(" s  ") == len(ends)
    assert np.asarray(Image.open(plot)).std() > 1


def test_video_shorter_than_a_window(model, tmp_path):
    path, out = write_video(tmp_path / "short.mp4", 3), tmp_path / "s.json"
    assert main([*model.flags(), "--stream", "--stride", "0.034", path, "--json", str(out)]) == 0
    # Partial windows are only for the annotated copy.
    (window,) = json.loads(out.read_text())["windows"]
    assert (window["start"], window["end"]) == (0, 0.1)
    cfg = load_config(model.cfg, ONE_VIEW)
    expected = score_views(load(model.cfg, model.checkpoint).network, load_views(path, cfg), cfg)
    assert window["top5"] == expected.argsort(descending=True)[:5].tolist()


# Milliseconds at which the frames start: 50 per second, then 10 per second with one long pause.
VARIABLE_MS = [*range(0, 1000, 20), *range(1000, 3000, 100), *range(4000, 5001, 100)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_times_with_a_variable_rate(model, tmp_path, suffix):
    """Windows have the given length and distance in seconds, and the frames of that time."""
    path = write_noise(tmp_path / f"a.{suffix}", len(VARIABLE_MS), pts=VARIABLE_MS)
    trained = load(model.cfg, model.checkpoint)
    windows = list(trained.stream(path, window=0.6, stride=0.3))
    images = np.stack(decode_all(path)[0])
    starts, end = np.array(VARIABLE_MS) / 1000, windows[-1].end
    assert 5 < end < 5.15  # the container may not store the duration of the last frame
    # The windows nearest to every stride; the pause of a second has no frame that ends in it.
    ends = [0.6, 0.9, 1.2, 1.5, 1.8, 2.1, 2.4, 2.7, 4, 4.2, 4.5, 4.8, end]
    np.testing.assert_allclose([window.end for window in windows], ends, atol=0.051)
    for window in windows:
        assert window.end - window.start == pytest.approx(0.6, abs=0.051)
        assert np.abs(np.append(starts, end) - window.end).min() < 0.0011
        last = np.searchsorted(starts, window.end - 0.001) - 1
        first = min(np.searchsorted(starts, window.start + 0.001, side="right") - 1, last)
        part = images[first : last + 1]
        (expected,) = trained.stream(part, window=len(part) / 30, fps=30)
        np.testing.assert_allclose(window.scores, expected.scores, atol=1e-6)


def test_a_constant_rate_in_the_stream_has_its_own_times(model, tmp_path):
    """H.264 with B-frames in AVI has no presentation timestamps."""
    options = {"bf": "3", "g": "12"}
    path = write_noise(tmp_path / "a.avi", 45, fps=25, options=options)
    with open_frames(str(path)) as (fps, frames):
        starts = [frame.start for frame in frames]
    assert fps == 25 and np.allclose(starts, np.arange(45) / 25)


def test_timeline_averages_to_its_capacity():
    timeline = Timeline(capacity=8)
    for number in range(100):
        timeline.add(Window(number, number + 1.0, np.array([number / 100, 1 - number / 100]), True))
    times, scores = timeline.points()
    assert len(times) <= 9
    assert times[0] < 16 and times[-1] > 84
    np.testing.assert_allclose(scores[:, 0], (times - 0.5) / 100, atol=1e-6)


MEASURE = """
import sys
from tests.helpers.commands import predict as main
def peak():
    text = open("/proc/self/status").read()
    return int(text.split("VmHWM:")[1].split()[0])
folder, short, long, *flags = sys.argv[1:]
peaks = []
for video in (short, long):
    assert main([*flags, "--stream", "--stride", "2", "--csv", folder + "/o.csv", "--json",
                 folder + "/o.json", "--plot", folder + "/o.png", "--video-out",
                 folder + "/o.mp4", video]) == 0
    peaks.append(peak())
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_length(model, tmp_path):
    short = write_video(tmp_path / "short.mp4", 240, (120, 160))
    long = write_video(tmp_path / "long.mp4", 4800, (120, 160))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path),
        short,
        long,
        *model.flags(),
        "DATA.TEST_CROP_SIZE",
        "64",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.split()[-1]) * 1024
    # The crops of all frames would be 56 MB, the frames 263 MB. Only the index of the MP4 that
    # is written grows, by about 200 bytes per frame.
    crops = (4800 - 240) * 64 * 64 * 3
    assert grown < crops / 3, grown
