"""`python -m benchmarks data` and `lists`, compared with a checkout."""

from __future__ import annotations

import pytest

from tests.helpers.runs import ROOT, finish, start
from tests.helpers.videos import write_video


def run(*arguments: object) -> str:
    process = start(*arguments, "--before", ROOT, program=("-m", "benchmarks"), folder=ROOT)
    code, stdout, stderr = finish(process)
    assert code == 0, stderr
    return stdout


@pytest.mark.slow
def test_reading_of_videos(tmp_path):
    video = write_video(tmp_path / "a b.mp4", 70, size=(48, 64))
    output = run("data", video, "--rounds", "1", "--train-samples", "1")
    assert "PySlowFast" in output
    assert "all views of a video" in output and "training sample" in output


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_long_lists(method):
    sizes = ("--videos", "3000", "--frames", "5000", "--workers", "2", "--start", method)
    rows = [line.split() for line in run("lists", *sizes).splitlines()]
    assert [row[0] for row in rows[3:]] == ["3,000", "3,000", "5,000", "5,000"]
