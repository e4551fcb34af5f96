from __future__ import annotations

import pytest

from slowfast_lara.analysis.loader_benchmark import STAGES, Speed, as_text, loader_speed, verdict
from slowfast_lara.data import decode
from tests.data.test_packets import settle
from tests.helpers.commands import data as main
from tests.helpers.videos import config, write_video


def test_speed_of_a_loader(synthetic):
    cfg = config(DATA__PATH_TO_DATA_DIR=str(synthetic), TRAIN__BATCH_SIZE=8)
    cfg.freeze()
    speed = loader_speed(cfg, [0, 1], 0.2)
    assert list(speed.rates) == [0, 1] and min(speed.rates.values()) > 0 and speed.batch == 8
    assert {*STAGES, "the rest", "put together"} <= speed.stages.keys()
    for stage in ("read, seek and decode", "convert to RGB", "crop and resize", "normalise"):
        assert speed.stages[stage] > 0


@pytest.mark.parametrize("repeated", [False, True])
def test_the_index_is_known_before_it_is_measured(tmp_path, monkeypatch, repeated):
    """Each video is scanned once, whatever is measured then."""
    paths = [settle(write_video(tmp_path / f"{n}.mp4", 20)) for n in range(5)]
    (tmp_path / "train.csv").write_text("".join(f"{path} 0\n" for path in paths))
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path), TRAIN__BATCH_SIZE=4)
    cfg.DATA.USE_REPEATED_AUG = repeated
    scans = tmp_path / "scans"
    scanned = decode.scanned

    def noted(path, *args, **options):
        with open(scans, "a") as file:  # a worker's memory is its own
            file.write(f"{path}\n")
        return scanned(path, *args, **options)

    monkeypatch.setattr(decode, "scanned", noted)
    speed = loader_speed(cfg, [0, 2], 0.5)
    assert sorted(scans.read_text().splitlines()) == sorted(map(str, paths))
    assert speed.scan > 0 and "a video that is new takes" in as_text(speed, None)


def test_verdict():
    speed = Speed({0: 10.0, 1: 9.0, 4: 32.0}, {"decode": 100.0}, 8)
    assert "NUM_WORKERS 0 is enough" in verdict(speed, 800, cores=4)
    assert "NUM_WORKERS 4 is enough" in verdict(speed, 250, cores=4)
    assert "NUM_WORKERS 8 should do" in verdict(speed, 125, cores=8)
    assert "bottleneck. About 8 workers" in verdict(speed, 125, cores=4)


def test_command(synthetic, capsys):
    keys = ["DATA.PATH_TO_DATA_DIR", str(synthetic), "MODEL.NUM_CLASSES", "12"]
    flags = ["--workers", "0", "--seconds", "1", "--step-ms", "100000"]
    assert main(["speed", "--cfg", "quick/lara", *flags, "--", *keys]) == 0
    printed = capsys.readouterr().out
    assert "a training sample takes" in printed and "NUM_WORKERS 0 is enough" in printed


@pytest.mark.parametrize(
    "words, said",
    [
        (["--cfg", "absent.yaml"], "absent.yaml"),
        (["--cfg", "quick/lara", "--workers", "-1"], "--workers"),
        (["--cfg", "quick/lara", "DATA.PATH_TO_DATA_DIR", "/absent"], "absent"),
    ],
)
def test_bad_input(words, said, capsys):
    try:
        code = main(["speed", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
