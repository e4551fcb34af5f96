"""`slowfast-lara data speed`: rates, stages of a sample, and the verdict for a GPU."""

from __future__ import annotations

import pytest

from slowfast_lara.analysis.loader_benchmark import STAGES, LoaderTable, loader_speed
from slowfast_lara.data import video as video_module
from tests.helpers.commands import data as main
from tests.helpers.datasets import make_synthetic
from tests.helpers.videos import config, set_old, write_video


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    sizes = {"classes": 12, "train": 24, "val": 1, "test": 1, "size": 48, "frames": 16}
    make_synthetic(folder, *(f"--{key}={value}" for key, value in sizes.items()))
    return folder


@pytest.mark.parametrize("gpus", [0, 1])
def test_speed_of_a_loader(synthetic, gpus):
    cfg = config(DATA__PATH_TO_DATA_DIR=str(synthetic), TRAIN__BATCH_SIZE=8, NUM_GPUS=gpus)
    cfg.freeze()
    speed = loader_speed(cfg, [0, 1], 0.2)
    assert list(speed.rates) == [0, 1] and min(speed.rates.values()) > 0 and speed.batch_size == 8
    assert {*STAGES, "other", "collate"} <= speed.stages.keys()
    for stage in ("seek and decode", "convert to RGB", "crop and resize"):
        assert speed.stages[stage] > 0
    assert (speed.stages["normalise"] > 0) == (gpus == 0)  # otherwise the GPU normalises


@pytest.mark.parametrize("repeated", [False, True])
def test_timestamps_are_cached_before_the_measurement(tmp_path, monkeypatch, repeated):
    """Each video is demuxed once for its timestamps."""
    paths = [set_old(write_video(tmp_path / f"{n}.mp4", 20)) for n in range(5)]
    (tmp_path / "train.csv").write_text("".join(f"{path} 0\n" for path in paths))
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path), TRAIN__BATCH_SIZE=4)
    cfg.DATA.USE_REPEATED_AUG = repeated
    log = tmp_path / "demuxed"
    read_timestamps = video_module.read_timestamps

    def noted(path):
        with open(log, "a") as file:  # shared by the workers
            file.write(f"{path}\n")
        return read_timestamps(path)

    monkeypatch.setattr(video_module, "read_timestamps", noted)
    speed = loader_speed(cfg, [0, 2], 0.5)
    demuxed = log.read_text().splitlines()
    assert len(demuxed) == len(set(demuxed)) >= 4
    assert speed.demux_ms > 0 and "the first read of a video takes" in speed.text()


def test_verdict():
    speed = LoaderTable("title", {0: 10.0, 1: 9.0, 4: 32.0}, {"decode": 100.0}, 8)
    assert "NUM_WORKERS 0 is enough" in speed.verdict(800, cores=4)
    assert "NUM_WORKERS 4 is enough" in speed.verdict(250, cores=4)
    assert "NUM_WORKERS 8 should be enough" in speed.verdict(125, cores=8)
    assert "bottleneck. It needs about 8 workers" in speed.verdict(125, cores=4)


def test_command(synthetic, tmp_path, capsys):
    keys = ["DATA.PATH_TO_DATA_DIR", str(synthetic), "MODEL.NUM_CLASSES", "12"]
    flags = ["--workers", "0", "--seconds", "1", "--step-ms", "100000"]
    flags += ["--out", str(tmp_path / "speed")]
    assert main(["speed", "--cfg", "quick/lara", *flags, "--", *keys]) == 0
    printed = capsys.readouterr().out
    assert "loading a training sample takes" in printed and "NUM_WORKERS 0 is enough" in printed
    lines = (tmp_path / "speed.csv").read_text().splitlines()
    assert lines[-2].startswith("DATA_LOADER.NUM_WORKERS,clips per second")


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--cfg", "absent.yaml"], "absent.yaml"),
        (["--cfg", "quick/lara", "--workers", "-1"], "--workers"),
        (["--cfg", "quick/lara", "DATA.PATH_TO_DATA_DIR", "/absent"], "absent"),
    ],
)
def test_bad_input(words, expected, capsys):
    try:
        code = main(["speed", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line
