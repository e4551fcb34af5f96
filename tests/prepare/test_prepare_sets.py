"""Preparation of sets with unusual file names, and into folders with earlier results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from slowfast_lara.data.video import count_frames
from tests.helpers.prepared_sets import failures, prepare, results
from tests.helpers.videos import REPOSITORY, write_video

NOT_UTF_8 = os.fsdecode(b"b\xff.mp4")


@pytest.fixture
def videos(tmp_path):
    """A folder with one video."""
    folder = tmp_path / "videos"
    folder.mkdir()
    write_video(folder / "1.mp4", 20)
    return folder


def test_names_that_are_not_utf_8(videos, tmp_path, capsys):
    os.rename(videos / "1.mp4", videos / NOT_UTF_8)
    (videos / os.fsdecode(b"c\xff.mp4")).write_bytes(b"not a video")
    assert prepare(videos, tmp_path / "out") == 1
    assert [os.path.basename(path) for path in results(tmp_path / "out")] == [NOT_UTF_8]
    assert b"/c\xff.mp4,no," in (tmp_path / "out" / "failures.csv").read_bytes()
    capsys.readouterr().out.encode()
    assert prepare(videos, tmp_path / "out") == 1
    assert prepare(videos, tmp_path / "none", "--dry-run") == 1
    assert "1 of 2 videos as a trial" in capsys.readouterr().out


def test_line_break_in_a_name(videos, tmp_path, capsys):
    shutil.copyfile(videos / "1.mp4", videos / "a\nb.mp4")
    assert prepare(videos, tmp_path / "out") == 1
    assert [path.name for path in results(tmp_path / "out")] == ["1.mp4"]
    assert failures(tmp_path / "out")["a\nb.mp4"][0] == "no"
    assert "a\\nb.mp4  failed" in capsys.readouterr().out


HOLD = """
import sys
from slowfast_lara.locks import exclusive_lock
with exclusive_lock(sys.argv[1], "OUT"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_exclusive_lock_of_the_output(videos, tmp_path, capsys):
    out = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, out],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        assert other.stdout.readline() == b"held\n"
        (out / ".writing-theirs.mp4").touch()
        assert prepare(videos, out) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"in use by another run: process {other.pid}" in line
        assert (out / ".writing-theirs.mp4").exists()
    finally:
        other.communicate()
    assert prepare(videos, out) == 0
    assert not (out / ".lock").exists()


def test_temporary_files_are_removed(videos, tmp_path):
    out = tmp_path / "out"
    (videos / "sub").mkdir()
    os.rename(videos / "1.mp4", videos / "sub" / "1.mp4")
    for folder in (out, out / "sub"):
        folder.mkdir()
        (folder / ".writing-1234.csv").touch()
    assert prepare(videos, out) == 0
    assert not list(out.rglob(".writing-*"))


def test_results_of_another_set_are_not_replaced(videos, tmp_path, capsys):
    out, others = tmp_path / "out", tmp_path / "others"
    assert prepare(videos, out) == 0
    others.mkdir()
    write_video(others / "1.avi", 30, codec="mpeg4")
    write_video(others / "2.mp4", 30)
    capsys.readouterr()
    assert prepare(others, out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(str(path) in line for path in (videos / "1.mp4", others / "1.avi", out))
    assert count_frames(str(out / "1.mp4")) == (20, 0) and not (out / "2.mp4").exists()
    os.rename(others / "1.avi", others / "3.avi")
    assert prepare(others, out) == 0
    assert len(results(out)) == 3
    assert prepare(videos, out) == prepare(others, out) == 0
    # The same folder, also through a link, is the same set.
    (tmp_path / "link").symlink_to(videos)
    assert prepare(tmp_path / "link", out) == 0
    (videos / "1.mp4").unlink()
    write_video(videos / "1.avi", 25, codec="mpeg4")
    assert prepare(videos, out) == 0
    assert count_frames(str(out / "1.mp4")) == (25, 0)


def test_moved_set(videos, tmp_path, capsys):
    out = tmp_path / "out"
    assert prepare(videos, out) == 0
    videos.rename(tmp_path / "moved")
    capsys.readouterr()
    assert prepare(tmp_path / "moved", out) == 2
    assert f"remove {out}/prepared.jsonl if" in capsys.readouterr().err
    (out / "prepared.jsonl").unlink()
    assert prepare(tmp_path / "moved", out) == 0


def test_links_to_videos_elsewhere(videos, tmp_path):
    links, out = tmp_path / "links", tmp_path / "out"
    links.mkdir()
    (links / "1.mp4").symlink_to(videos / "1.mp4")
    (links / "class").symlink_to(videos)
    kept = []
    for _ in range(2):
        assert prepare(links, out) == 0
        kept.append([(out / name).stat().st_ino for name in ("1.mp4", "class/1.mp4")])
    assert kept[0] == kept[1]


def test_lists_with_several_classes(videos, tmp_path):
    labels = {"train": "3,17", "val": '"0,4"', "test": '""'}
    for split, label in labels.items():
        (videos / f"{split}.csv").write_text(f"1.mp4 {label}\n1.mp4 2\n")
    out = tmp_path / "out"
    assert prepare(videos, out) == 0
    for split, label in labels.items():
        expected = f"{out}/1.mp4 {label}\n{out}/1.mp4 2\n"
        assert (out / f"{split}.csv").read_text() == expected


def test_record_with_invalid_lines(videos, tmp_path):
    out = tmp_path / "out"
    assert prepare(videos, out) == 0
    kept = (out / "1.mp4").stat().st_ino
    with open(out / "prepared.jsonl", "ab") as file:
        file.write(b'["\xff\n[1, 2, 3, 4, []]\n["a", 1, 2, 3, [4]]\n')
    assert prepare(videos, out) == 0
    assert (out / "1.mp4").stat().st_ino == kept


def test_link_to_the_results_is_ignored(videos, tmp_path):
    out = tmp_path / "out"
    (videos / "done").symlink_to(out)
    for _ in range(3):
        assert prepare(videos, out) == 0
        assert len(results(out)) == 1
