from __future__ import annotations

import errno
import os

import pytest

from slowfast_lara.data.lists import listed_videos_below, read_path_labels, videos_below
from slowfast_lara.errors import DataError
from slowfast_lara.prepare.lists import classes_of


def read(tmp_path, content, separator=" ", prefix="/data"):
    path = tmp_path / "train.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_path_labels(str(path), separator, 10, prefix)


def test_spaces_crlf_blank_lines_and_bom(tmp_path):
    content = "\ufeffa b/c d.mp4 3\r\n\r\n  \n/abs/x.mp4 0 \nlast.mp4 9"
    assert read(tmp_path, content) == (
        ["/data/a b/c d.mp4", "/abs/x.mp4", "/data/last.mp4"],
        [3, 0, 9],
    )


@pytest.mark.parametrize("separator", [",", "\t", ";;"])
def test_other_separators(tmp_path, separator):
    content = f"a b, c.mp4{separator}3\n"
    assert read(tmp_path, content, separator) == (["/data/a b, c.mp4"], [3])


@pytest.mark.parametrize(
    "content, line, expected",
    [
        ("a.mp4 0\n\nb.mp4\n", 3, "path label"),
        ("a.mp4 0\nb.mp4,1\n", 2, "expected 'path label'"),
        ("a.mp4 0\nb.mp4 one\n", 2, "class number"),
        ("a.mp4 0\nb.mp4 1.0\n", 2, "class number"),
        ("a.mp4 10\n", 1, "0 to 9"),
        ("a.mp4 -1\n", 1, "0 to 9"),
        ("original_vido_id video_id frame_id path labels\n", 1, "class number"),
    ],
)
def test_wrong_lines(tmp_path, content, line, expected):
    with pytest.raises(DataError) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert f"{tmp_path}/train.csv, line {line}: " in message and expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "content, expected", [("", "empty"), ("\n\r\n", "empty"), (b"\xff\xfe\x00a 1\n", "UTF-8")]
)
def test_wrong_files(tmp_path, content, expected):
    with pytest.raises(DataError, match=expected):
        read(tmp_path, content)


def test_a_missing_list(tmp_path):
    with pytest.raises(DataError, match="absent.csv"):
        read_path_labels(str(tmp_path / "absent.csv"), " ", 10, "")


def test_relative_paths_without_prefix(tmp_path, monkeypatch):
    content = "a.mp4 1\n"
    assert read(tmp_path, content, prefix="")[0] == [f"{tmp_path}/a.mp4"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.mp4").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read(tmp_path, content, prefix="")[0] == ["a.mp4"]


def test_first_existing_path_decides_what_paths_are_relative_to(tmp_path, monkeypatch):
    monkeypatch.chdir(make_files(tmp_path / "elsewhere", "a.mp4"))
    (tmp_path / "b.mp4").touch()
    for names in (["gone.mp4", "a.mp4", "b.mp4"], ["gone.mp4", "b.mp4", "a.mp4"]):
        content = "".join(f"{name} 1\n" for name in names)
        folder = "" if names[1] == "a.mp4" else f"{tmp_path}/"
        assert read(tmp_path, content, prefix="")[0] == [folder + name for name in names]


def make_files(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_links_in_a_circle_are_not_followed(tmp_path):
    top = make_files(tmp_path / "top", "a.mp4")
    make_files(top / "sub" / "deeper", "b.mp4")
    (top / "again").symlink_to(top)
    (top / "parent").symlink_to(tmp_path)
    (top / "a_link").symlink_to(top / "sub")
    (top / "sub" / "up").symlink_to("..")
    assert list(videos_below(str(top))) == [f"{top}/a.mp4", f"{top}/sub/deeper/b.mp4"]


def test_links_elsewhere_are_followed_once(tmp_path):
    top, elsewhere = make_files(tmp_path / "top"), make_files(tmp_path / "disk", "a.mp4")
    make_files(elsewhere / "sub", "b.mp4")
    (elsewhere / "back").symlink_to(top)
    (elsewhere / "circle").symlink_to(elsewhere)
    (top / "1").symlink_to(elsewhere / "sub")
    (top / "2").symlink_to(elsewhere)
    (top / "3").symlink_to(elsewhere)
    assert list(videos_below(str(top))) == [f"{top}/1/b.mp4", f"{top}/2/a.mp4"]


def test_links_do_not_change_the_labels(tmp_path):
    for name in ("closing", "opening"):
        make_files(tmp_path / name, "1.mp4", "2.mp4", "3.mp4")
    (tmp_path / "closing" / "all").symlink_to(tmp_path)
    (tmp_path / "opening" / "all").symlink_to("..")
    (tmp_path / "closing" / "itself").symlink_to(".")
    for name, paths in classes_of(str(tmp_path)).items():
        assert paths == [f"{tmp_path}/{name}/{number}.mp4" for number in (1, 2, 3)]
    (tmp_path / "opening" / "other").symlink_to(tmp_path / "closing")
    with pytest.raises(DataError, match="same file in two classes"):
        classes_of(str(tmp_path))


def test_a_line_break_in_a_path(tmp_path):
    make_files(tmp_path / "top", "a\nb.mp4")
    with pytest.raises(DataError, match="line breaks") as caught:
        list(listed_videos_below(str(tmp_path / "top")))
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_utf_8(tmp_path):
    make_files(tmp_path / "top", os.fsdecode(b"a\xff.mp4"))
    with pytest.raises(DataError, match="UTF-8") as caught:
        list(listed_videos_below(str(tmp_path / "top")))
    str(caught.value).encode()


def test_every_kind_of_video_is_found(tmp_path):
    names = ["1.3gp", "2.MPEG", "3.ogv", "4.m2ts", "5.mts", "6.vob", "7.3g2", "8.asf"]
    top = make_files(tmp_path / "top", *names, "notes.txt", ".hidden.mp4")
    assert list(videos_below(str(top))) == [f"{top}/{name}" for name in names]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    top = make_files(tmp_path / "top", "a.mp4")
    make_files(top / "closed", "b.mp4")
    scandir = os.scandir

    def refuse(path):  # root may read any folder
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="cannot read the folder .*closed: Permission denied"):
        list(videos_below(str(top)))


def test_a_device_is_refused(tmp_path):
    """/dev/null ends at once; a FIFO or /dev/zero would block forever."""
    (tmp_path / "train.csv").symlink_to("/dev/null")
    with pytest.raises(DataError, match="train.csv: .* file"):
        read_path_labels(str(tmp_path / "train.csv"), " ", 10, "")
