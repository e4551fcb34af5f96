"""Preparation of a whole set: results, resuming after signals, bad videos."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.video import count_frames
from slowfast_lara.errors import DataError, DecodeError, InputError
from slowfast_lara.prepare.prepare import find_tasks, result_names
from tests.helpers.prepared_sets import QUICK, failures, prepare, results
from tests.helpers.videos import REPOSITORY, config, write_malformed, write_video


def start(videos: Path, out: Path, *options: str, **popen) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "datasets/prepare_videos.py", videos, out, *QUICK, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
        **popen,
    )


def is_whole(out: Path, names: list[str]) -> bool:
    """All results exist and decode, and no temporary file is left."""
    assert not list(out.rglob(".writing-*"))
    assert sorted(str(path.relative_to(out)) for path in results(out)) == sorted(names)
    return all(count_frames(str(out / name))[1] == 0 for name in names)


@pytest.fixture(scope="module")
def some_videos(tmp_path_factory) -> Path:
    """Three videos with lists and class names, and one that does not decode."""
    folder = tmp_path_factory.mktemp("set")
    (folder / "a class" / "more").mkdir(parents=True)
    write_video(folder / "a class" / "1.avi", 20, codec="mpeg4", fps=25)
    write_video(folder / "a class" / "more" / "2.webm", 22, codec="libvpx-vp9")
    write_video(folder / "3.mp4", 24, audio=True)
    (folder / "bad.mp4").write_bytes(b"not a video")
    (folder / "classes.json").write_text('["one", "two", "three"]')
    (folder / "something-something-v2-labels.json").write_text("{}")
    (folder / "train.csv").write_text("a class/1.avi 0\na class/more/2.webm 1\nbad.mp4 2\n")
    (folder / "val.csv").write_text(f"{folder}/3.mp4 2\nelsewhere.mp4 1\n")
    (folder / "test.csv").write_text("label,youtube_id,time_start,time_end\nx,y,1,2\n")
    return folder


RESULTS = ["3.mp4", "a class/1.mp4", "a class/more/2.mp4"]


def test_results_lists_and_failures(some_videos, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(some_videos, out) == 1
    assert is_whole(out, RESULTS)
    printed, bar = capsys.readouterr()
    assert bar == ""  # only on a terminal
    assert "train.csv: 2 videos, 1 left out" in printed
    assert "val.csv: 1 video, 1 left out" in printed
    assert "test.csv: no lines of 'path label'" in printed
    assert "1 failed, 0 are damaged" in printed and "bad.mp4" in printed
    assert list(failures(out)) == ["bad.mp4"] and failures(out)["bad.mp4"][0] == "no"
    assert (out / "val.csv").read_text() == f"{out}/3.mp4 2\n"
    assert not (out / "test.csv").exists()
    for name in ("classes.json", "something-something-v2-labels.json"):
        assert (out / name).read_bytes() == (some_videos / name).read_bytes()
    dataset = Kinetics(config(DATA__PATH_TO_DATA_DIR=str(out)), "train")
    assert [dataset[index].label for index in range(2)] == [0, 1]
    assert not dataset[0].failures and not dataset[1].failures


def test_changed_videos_and_options_are_prepared_again(some_videos, tmp_path):
    videos, out = tmp_path / "videos", tmp_path / "out"
    shutil.copytree(some_videos, videos)
    (videos / "bad.mp4").unlink()

    def changed(*options: str) -> list[str]:
        """Results that this run has written."""
        before = {name: os.stat(out / name).st_ino for name in RESULTS if (out / name).exists()}
        assert prepare(videos, out, *options) == 0
        assert is_whole(out, RESULTS)
        return [name for name in RESULTS if before.get(name) != os.stat(out / name).st_ino]

    assert changed() == RESULTS
    assert failures(out) == {}
    assert changed() == []
    write_video(videos / "3.mp4", 30)
    assert changed() == ["3.mp4"]
    assert count_frames(str(out / "3.mp4")) == (30, 0)
    assert changed("--crf", "30") == RESULTS
    assert changed("--crf", "30", "--time-limit", "99") == []
    (out / RESULTS[1]).unlink()
    (out / RESULTS[2]).write_bytes(b"torn")
    assert changed("--crf", "30") == RESULTS[1:]
    assert changed("--crf", "30") == []
    with open(out / "prepared.jsonl", "r+") as record:  # truncate the last line
        record.truncate(os.path.getsize(out / "prepared.jsonl") - 9)
    assert len(changed("--crf", "30")) == 1
    assert changed("--crf", "30") == []


def test_result_names():
    names = result_names(["a.mp4", "a.avi", "b.webm", "c/a.mkv"])
    assert names == {
        "a.mp4": "a.mp4",
        "a.avi": "a.avi.mp4",
        "b.webm": "b.mp4",
        "c/a.mkv": "c/a.mp4",
    }
    with pytest.raises(DataError, match=r"a\.avi and a\.avi\.mp4 would both become"):
        result_names(["a.mp4", "a.avi", "a.avi.mp4"])


def test_bad_input(some_videos, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    assert prepare(tmp_path / "absent", out) == 2
    assert prepare(tmp_path / "empty", out) == 2
    assert prepare(some_videos, some_videos / "out") == 2
    assert prepare(some_videos, some_videos) == 2
    with pytest.raises(InputError, match="inside"):
        find_tasks(str(some_videos), str(some_videos.parent))
    with pytest.raises(SystemExit):
        prepare(some_videos, out, "--crf", "52")
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5 and all(line.startswith("error: ") for line in errors)
    assert not out.exists()


def test_dry_run(some_videos, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(some_videos, out, "--dry-run") == 1
    printed = capsys.readouterr().out
    assert "3 of 4 videos as a trial" in printed
    assert "the whole set: about 1 minute with 2 processes" in printed
    assert not out.exists()


def many_videos(folder: Path) -> list[str]:
    """Copies of one video: a few seconds of work in total."""
    folder.mkdir()
    one = write_video(folder / "00.mp4", 150, size=(144, 192), options={"preset": "ultrafast"})
    for number in range(1, 24):
        shutil.copyfile(one, folder / f"{number:02d}.mp4")
    return [f"{number:02d}.mp4" for number in range(24)]


def wait_for_results(out: Path, process: subprocess.Popen) -> None:
    limit = time.monotonic() + 120
    while len(results(out)) < 2 and time.monotonic() < limit:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_resume_after_a_signal(tmp_path, how):
    names, out = many_videos(tmp_path / "videos"), tmp_path / "out"
    process = start(tmp_path / "videos", out)
    wait_for_results(out, process)
    if how == signal.SIGINT:  # a terminal sends it to the process group
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    printed = process.communicate(timeout=60)[0]
    limit = time.monotonic() + 60
    while len(os.popen(f"pgrep -s {process.pid}").read().split()):
        assert time.monotonic() < limit, "processes are still running"
        time.sleep(0.05)
    kept = {path.name: path.stat().st_ino for path in results(out)}
    assert 2 <= len(kept) < len(names)
    assert all(count_frames(str(out / name)) == (150, 0) for name in kept)
    if how == signal.SIGINT:
        assert process.returncode == 130 and "error: interrupted" in printed
        assert not list(out.glob(".writing-*"))
    assert prepare(tmp_path / "videos", out) == 0
    assert is_whole(out, names)
    # Each process may have renamed one result that is not recorded yet.
    again = [name for name in kept if (out / name).stat().st_ino != kept[name]]
    assert len(again) <= 2


def test_full_disk(tmp_path, capsys):
    """A file system has room for half of the results."""
    names = many_videos(tmp_path / "videos")
    probe = tmp_path / "probe"
    assert prepare(tmp_path / "videos", probe) == 0
    size = sum(path.stat().st_size for path in results(probe)) // 2
    out = tmp_path / "out"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(out)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system")
    try:
        capsys.readouterr()
        assert prepare(tmp_path / "videos", out) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and "No space left on device" in error
        kept = [path.name for path in results(out)]
        assert 0 < len(kept) < len(names)
        assert is_whole(out, kept)
        subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(out)], check=True)
        assert prepare(tmp_path / "videos", out) == 0
        assert is_whole(out, names)
    finally:
        subprocess.run(["umount", str(out)], check=True)


def test_malformed_videos(tmp_path, capfd):
    videos, out = tmp_path / "videos", tmp_path / "out"
    videos.mkdir()
    write_malformed(videos)
    found = find_tasks(str(videos), str(out))
    assert len(found) >= 200
    assert prepare(videos, out) == 1
    failed = failures(out)
    for video in found:
        name = os.path.basename(video.source)
        prepared, reason = failed.get(name, ("yes", ""))
        assert os.path.exists(video.result) == (prepared == "yes"), name
        assert "\n" not in reason and (prepared == "yes" or reason), name
        if prepared == "yes":
            frames, _ = count_frames(video.source)
            assert count_frames(video.result) == (frames, 0), name
        elif name.startswith(("flipped", "cut")):  # training cannot read these either
            with pytest.raises(DecodeError):
                count_frames(video.source)
    unreadable = ("zeros", "noise", "text", "list", "concat", "audio", "dangling", "circle", "fifo")
    for video in found:
        if (name := os.path.basename(video.source)).startswith((*unreadable, "cut0.")):
            assert failed[name][0] == "no"
    assert {"yes", "no"} == {prepared for prepared, _ in failed.values()}
    assert not list(out.rglob(".writing-*"))
    assert "Traceback" not in capfd.readouterr().err
