"""Fingerprint of config, code and lists."""

from __future__ import annotations

import pytest

import slowfast_lara
from slowfast_lara.config import load_config
from slowfast_lara.engine.fingerprint import differences, run_fingerprint
from tests.helpers.runs import write_config


@pytest.fixture()
def lists(tmp_path):
    folder = tmp_path / "lists"
    folder.mkdir()
    for name in ("train", "val", "test"):
        (folder / f"{name}.csv").write_text("a.mp4 0\n")
    return folder


def fingerprint(tmp_path, lists, **changes):
    config = write_config(tmp_path / "c.yaml", lists, "out", **changes)
    return run_fingerprint(load_config(config), 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.BASE_LR", 0.5),
        ("SOLVER.MAX_EPOCH", 7),
        ("VIT.APPROX_ATTN_TYPE", "performer"),
        ("VIT.DEPTH", 1),
        ("RNG_SEED", 5),
        ("OUTPUT_DIR", "elsewhere"),
    ],
)
def test_a_different_key_is_named(tmp_path, lists, key, value):
    ours = fingerprint(tmp_path, lists, **{key.replace(".", "__"): value})
    problem = differences(ours, fingerprint(tmp_path, lists), 3)
    assert problem.startswith(f"{key} is {value!r} on rank 3 and ")
    assert problem.count(" is ") == 1 and problem.endswith(" on rank 0")


@pytest.mark.parametrize("name", ["train.csv", "val.csv", "test.csv"])
@pytest.mark.parametrize("content", ["a.mp4 1\n", "a.mp4 0\na.mp4 0\n", None])
def test_a_different_list_is_named(tmp_path, lists, name, content):
    rank0 = fingerprint(tmp_path, lists)
    if content is None:
        (lists / name).unlink()
    else:
        (lists / name).write_text(content)
    problem = differences(fingerprint(tmp_path, lists), rank0, 1)
    assert problem.startswith(f"{name} is ") and problem.count(" is ") == 1


def test_a_list_that_is_not_a_regular_file(tmp_path, lists):
    (lists / "val.csv").unlink()
    (lists / "val.csv").symlink_to("/dev/null")
    assert fingerprint(tmp_path, lists)["val.csv"].startswith("unreadable")


def test_different_code_is_named(tmp_path, lists, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(slowfast_lara, "__file__", str(package / "__init__.py"))
    rank0 = fingerprint(tmp_path, lists)
    (package / "more.py").write_text("x = 1\n")
    assert differences(fingerprint(tmp_path, lists), rank0, 1).startswith("the code is 0.")


def test_keys_that_may_differ_between_nodes(tmp_path, lists):
    changes = {"SHARD_ID": 1, "DATA_LOADER__NUM_WORKERS": 3, "DATA_LOADER__PIN_MEMORY": False}
    ours = fingerprint(tmp_path, lists, NUM_SHARDS=2, **changes)
    assert differences(ours, fingerprint(tmp_path, lists, NUM_SHARDS=2), 1) == ""


def test_only_the_first_differences_are_listed():
    problem = differences({f"K{i}": "1" for i in range(50)}, {f"K{i}": "2" for i in range(50)}, 1)
    assert problem.count(" is ") == 8 and problem.endswith("; 42 more differ")
