"""Atomic writes, and strict JSON in all files that the package reads."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path

import pytest

from slowfast_lara.data.classes import read_names
from slowfast_lara.data.ssv2 import PREFIX, read_annotations
from slowfast_lara.errors import DataError, InputError
from slowfast_lara.files import (
    atomic_folder,
    atomic_write,
    csv_cell,
    open_in_place,
    parse_json,
    remove_unfinished,
    write_text,
)
from slowfast_lara.runs.folder import CONFIG, LOG, TEST_RESULTS, read_run, read_stats

LONG = "9" * 5000
BAD = {
    "long": LONG,
    "beyond 64 bits": str(2**63),
    "deep": "[" * 100_000,
    "NaN": "NaN",
    "infinite": "-Infinity",
    "cut off": '{"a": ',
}


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_parse_json_rejects(value):
    with pytest.raises(ValueError) as caught:
        parse_json(f"[{value}]")
    one_line(caught)


def test_parse_json_accepts():
    text = '{"a": [1, -1.5, 9223372036854775807, -9223372036854775807, 1e400, true, null, "NaN"]}'
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("value", ["=1", " +1", "-1", "@a", "\tx", "\rx", "\nx", "＝1"])
def test_cells_of_formulas_are_quoted(value):
    assert csv_cell(value) == f"'{value}"
    assert [csv_cell(other) for other in ("a=1", " x", "", -1.5)] == ["a=1", " x", "", -1.5]


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_invalid_class_names(tmp_path, value):
    path = tmp_path / "classes.json"
    for text in (f'{{"walk": {value}}}', f'["walk", {value}]'):
        path.write_text(text)
        with pytest.raises(DataError, match="classes.json") as caught:
            read_names(str(path))
        one_line(caught)


@pytest.mark.parametrize("value", ["1.5", "1e400", "true", "null", "[1]", f'"{LONG}"'])
def test_invalid_class_indices(tmp_path, value):
    (tmp_path / "classes.json").write_text(f'{{"walk": {value}}}')
    with pytest.raises(DataError, match="'walk' has number") as caught:
        read_names(str(tmp_path / "classes.json"))
    one_line(caught)


def test_class_names_from_a_device():
    with pytest.raises(DataError, match="/dev/zero"):
        read_names("/dev/zero")


def test_annotations_from_a_device(tmp_path):
    (tmp_path / f"{PREFIX}labels.json").symlink_to("/dev/null")
    with pytest.raises(DataError, match="not a regular file"):
        read_annotations(str(tmp_path), "train", 174)


@pytest.mark.parametrize("value", [*BAD.values(), "1e400", "true", f'"{LONG}"'])
@pytest.mark.parametrize("split", ["labels", "train"])
def test_invalid_annotations(tmp_path, value, split):
    texts = {"labels": '{"Walking": "3"}', "train": '[{"id": 1, "template": "Walking"}]'}
    texts[split] = texts[split].replace('"3"', value).replace('"Walking"}', f"{value}}}")
    for name, text in texts.items():
        (tmp_path / f"{PREFIX}{name}.json").write_text(text)
    with pytest.raises(DataError, match=PREFIX) as caught:
        read_annotations(str(tmp_path), "train", 174)
    one_line(caught)


ENTRY = '{"path": "a", "label": 1, "top5": [2], "top5_scores": [0.5]}'


@pytest.mark.parametrize(
    "field, value",
    [
        *itertools.product(
            ['"label": 1', "[2]"], [*BAD.values(), "1e400", "-1", "100000000", "null", '"x"']
        ),
        *itertools.product(["[0.5]"], [*BAD.values(), "1e400", "null", '"x"']),
    ],
)
def test_invalid_test_results(tmp_path, field, value):
    invalid = ENTRY.replace(field, field[:-1] + value if field[0] == '"' else f"[{value}]")
    (tmp_path / TEST_RESULTS).write_text(f'{{"videos": [{invalid}], "failed": []}}')
    with pytest.raises(InputError, match=TEST_RESULTS) as caught:
        read_run(str(tmp_path), None)
    one_line(caught)


@pytest.mark.parametrize("content", ["[]", '{"videos": [1], "failed": []}', '{"videos": {}}'])
def test_test_results_of_another_structure(tmp_path, content):
    (tmp_path / TEST_RESULTS).write_text(content)
    with pytest.raises(InputError, match=TEST_RESULTS) as caught:
        read_run(str(tmp_path), None)
    one_line(caught)


@pytest.mark.parametrize(
    "config",
    [
        "MODEL: {NUM_CLASSES: x}",
        "MODEL: {NUM_CLASSES: 1000000000000}",
        "TRAIN: {BATCH_SIZE: x}",
        "NUM_SHARDS: 1000000000000",
        "a: &a [x, *a]",
        "- x",
        "x: " + LONG,
    ],
)
def test_invalid_config_of_a_run(tmp_path, config):
    (tmp_path / TEST_RESULTS).write_text(f'{{"videos": [{ENTRY}], "failed": []}}')
    (tmp_path / CONFIG).write_text(config)
    with pytest.raises(InputError, match=CONFIG) as caught:
        read_run(str(tmp_path), None)
    one_line(caught)


def test_invalid_log_lines_are_skipped(tmp_path):
    lines = [f'x json_stats: {{"_type": "train_epoch", "loss": {value}}}' for value in BAD.values()]
    lines += [f'x json_stats: {{"_type": "train_epoch", "epoch": "{LONG[:400]}/3", "loss": 1}}']
    lines += ['x json_stats: {"_type": "train_epoch", "epoch": "2/3", "loss": 2}']
    (tmp_path / LOG).write_text("\n".join(lines))
    assert [str(line["loss"]) for line in read_stats(tmp_path)] == ["nan", "-inf", "1", "2"]
    assert read_run(str(tmp_path), None).curve("train_epoch", "loss") == [(2.0, 2.0)]


def test_remove_unfinished(tmp_path):
    (tmp_path / ".writing-a.mp4").touch()
    (tmp_path / ".writing-b").mkdir()
    (tmp_path / ".writing-b" / "model.onnx").touch()
    (tmp_path / "whole").mkdir()
    (tmp_path / ".writing-c").symlink_to(tmp_path / "whole")
    remove_unfinished(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("kind", ["symlink", "dangling", "hard link", "fifo", "device"])
def test_files_written_in_place_are_not_links(tmp_path, kind):
    target, path = tmp_path / "target", tmp_path / "log"
    target.write_text("precious")
    if kind == "symlink":
        path.symlink_to(target)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "absent")
    elif kind == "hard link":
        path.hardlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(OSError) as caught, open(path, "w", opener=open_in_place):
        pass
    assert os.fspath(caught.value.filename) == str(path)
    assert target.read_text() == "precious" and not (tmp_path / "absent").exists()


def test_atomic_write_replaces_a_link(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "a.txt").symlink_to(tmp_path / "target")
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "a.txt").is_symlink()


def test_failed_folder_leaves_no_parents(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(OSError, match="full"), atomic_folder(tmp_path / "there" / "a" / "b" / "c"):
        raise OSError("full")
    assert not list((tmp_path / "there").iterdir())


def test_errors_of_a_write_name_the_path(tmp_path):
    """They do not name the temporary file."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", Path("/proc/a.txt")):
        with pytest.raises(OSError) as caught, atomic_write(path) as name:
            open(name, "w").close()
        assert (caught.value.filename, caught.value.filename2) == (str(path), None)


def test_failed_write_keeps_the_old_file(tmp_path):
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(OSError, match="full") as caught, atomic_write(tmp_path / "a.txt") as name:
        with open(name, "w") as file:
            file.write("new")
        raise OSError(errno.ENOSPC, "full")
    assert caught.value.filename == str(tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
