from __future__ import annotations

import pytest

from slowfast_lara.data.lists import read_path_labels
from slowfast_lara.errors import DataError


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
        ("a.mp4 0\nb.mp4,1\n", 2, "'path label' is expected"),
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
