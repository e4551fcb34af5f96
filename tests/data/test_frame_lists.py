"""Lists of frames, and the arrays of strings that workers share."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from slowfast_lara.data.frame_lists import HEADER, read_frame_list
from slowfast_lara.data.string_array import StringArray
from slowfast_lara.errors import DataError


def lines_of(rng: np.random.Generator, videos: int) -> list[str]:
    names = rng.permutation(2000)[:videos] + 1
    return [
        f"{name} {number} {frame * 3} {name}/a b_{frame:05d}.jpg {label}"
        for number, name in enumerate(names)
        for frame in range(int(rng.integers(1, 30)))
        for label in [rng.choice(['""', "1,2"])]
    ]


def write(folder: Path, lines: list[str]) -> str:
    path = folder / "train.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    return str(path)


def reference(lines: list[str]) -> tuple[list[str], list[str]]:
    """Names and paths, line by line."""
    names = list(dict.fromkeys(line.split()[0] for line in lines))
    paths = dict.fromkeys(names, "")
    for line in lines:
        name, _, _, path = line.rsplit(" ", 1)[0].split(" ", 3)
        paths[name] += f"{path}\n"
    return names, list(paths.values())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n \n"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n \r\n"])
@pytest.mark.parametrize("seed", range(3))
def test_line_ends_blank_lines_and_bom(tmp_path, start, end, seed):
    lines = lines_of(np.random.default_rng(seed), 40)
    path = tmp_path / "train.csv"
    path.write_bytes((start + end.join([HEADER, *lines])).encode())
    names, paths = reference(lines)
    found = read_frame_list(str(path), with_labels=True)
    assert found[:2] == read_frame_list(str(path))[:2] == (names, paths) and len(names) == 40
    labels = [line.rsplit(" ", 1)[1] for line in lines]
    assert "".join(found.labels).split("\n")[:-1] == labels


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(" ", "\t"),
        lambda line: line.replace(" ", "  ", 1),
        lambda line: f" {line}",
        lambda line: f"{line} ",
        lambda line: f"{line}\r",
        lambda line: f"{line}\n",
        lambda line: line.replace("a b", "ä\u3000b"),
        lambda line: "x" * 40 + line,
    ],
)
def test_other_whitespace_and_characters(tmp_path, change):
    lines = [f"{video} 0 {frame} {video}/a b{frame}.jpg 0" for video in (1, 2) for frame in (0, 1)]
    changed = [*lines[:2], change(lines[2]), change(lines[3])]
    found = read_frame_list(write(tmp_path, changed))
    assert len(found.names) == 2 and found.paths[0] == "1/a b0.jpg\n1/a b1.jpg\n"
    assert found.paths[1].count("\n") == 2


def test_a_list_of_only_the_header(tmp_path):
    with pytest.raises(DataError, match="train.csv: no frames below the header"):
        read_frame_list(write(tmp_path, []))


def test_frames_out_of_order(tmp_path):
    lines = [f"{video} 0 {frame} {video}/{frame}.jpg 0" for video in (1, 2) for frame in (10, 9, 2)]
    paths = read_frame_list(write(tmp_path, lines)).paths
    assert paths == ["1/2.jpg\n1/9.jpg\n1/10.jpg\n", "2/2.jpg\n2/9.jpg\n2/10.jpg\n"]


@pytest.mark.parametrize("wrong", ["7 0 x a.jpg 0", "7 0 1 a.jpg", "7", "7 0 1  "])
@pytest.mark.parametrize("before", [0, 30])
def test_wrong_lines_are_reported(tmp_path, wrong, before):
    lines = [f"1 0 {frame} {frame}.jpg 0" for frame in range(before)]
    with pytest.raises(DataError, match=f"train.csv, line {before + 2}: "):
        read_frame_list(write(tmp_path, [*lines, wrong]))


def test_frames_of_a_video_that_are_not_consecutive(tmp_path):
    lines = [f"{name} 0 0 {name}.jpg 0" for name in (1, 2, 1)]
    with pytest.raises(DataError, match="video 1 must be consecutive"):
        read_frame_list(write(tmp_path, lines))


def test_string_array():
    some = ["", "a b", "ä/ö\u2028.jpg", "\udcff", "x" * 1000]
    texts = StringArray.of(some)
    assert texts == some and list(texts) == some and len(texts) == 5
    assert texts[-1] == some[-1] and texts[1:3] == some[1:3] and texts[4:0:-2] == some[4:0:-2]
    assert texts != some[:-1] and "a b" in texts and texts.index("a b") == 1
    for number in (5, -6):
        with pytest.raises(IndexError):
            texts[number]
    assert StringArray.of([]) == [] and pickle.loads(pickle.dumps(texts)) == some


def report_sharing(strings: StringArray, answer) -> None:
    answer.put((strings[1], strings.__getstate__()[0].is_shared()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_memory(method):
    """PyTorch passes the memory itself to a spawned process."""
    context = torch.multiprocessing.get_context(method)
    texts, answer = StringArray.of(["a", "b"]), multiprocessing.get_context(method).Queue()
    process = context.Process(target=report_sharing, args=(texts, answer))
    process.start()
    assert answer.get(timeout=120) == ("b", method == "spawn")
    process.join()
