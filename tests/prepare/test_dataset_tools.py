"""List builders and the check of videos, run as commands."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from slowfast_lara.cli import main
from slowfast_lara.data.classes import names_in
from slowfast_lara.data.kinetics import Kinetics
from slowfast_lara.data.ssv2 import Ssv2
from tests.helpers.datasets import TEMPLATES, write_annotations
from tests.helpers.runs import ROOT, finish, start
from tests.helpers.videos import config, write_video


def run(script: str, *arguments, expect: int = 0) -> str:
    code, stdout, stderr = finish(start(*arguments, program=tuple(script.split()), folder=ROOT))
    assert code == expect, stderr
    return stdout + stderr


def test_kinetics_lists(tmp_path):
    (tmp_path / "videos" / "air drumming").mkdir(parents=True)
    write_video(tmp_path / "videos" / "air drumming" / "abc_000003_000013.mp4", 10)
    write_video(tmp_path / "videos" / "-d_e.mkv", 10)
    annotations = tmp_path / "k400.csv"
    annotations.write_text(
        "label,youtube_id,time_start,time_end,split\r\n"
        '"zumba, fast",-d_e,1.0,11.0,train\r\nair drumming,abc,3,13,train\r\n'
        "air drumming,gone,5,15,train\r\n"
    )
    output = run(
        "datasets/build_kinetics_lists.py",
        tmp_path / "videos",
        tmp_path / "out",
        "--train",
        annotations,
        "--separator",
        ",",
    )
    assert "train: 2 of 3 videos found, 1 missing" in output
    assert (tmp_path / "out/missing_train.txt").read_text() == "gone_000005_000015\n"
    assert json.loads((tmp_path / "out/classes.json").read_text()) == [
        "air drumming",
        "zumba, fast",
    ]
    dataset = Kinetics(
        config(
            DATA__PATH_TO_DATA_DIR=str(tmp_path / "out"),
            MODEL__NUM_CLASSES=2,
            DATA__PATH_LABEL_SEPARATOR=",",
        ),
        "train",
    )
    assert dataset.labels == [1, 0] and all(dataset[i].failures == [] for i in range(2))


@pytest.mark.parametrize(
    "content, expected",
    [
        ("a,b\n1,2\n", "line 1: expected columns label, youtube_id"),
        ("label,youtube_id,time_start,time_end\nx,y,a,b\n", "line 2: expected numbers"),
    ],
)
def test_invalid_annotations(tmp_path, content, expected):
    (tmp_path / "k400.csv").write_text(content)
    write_video(tmp_path / "a.mp4", 2)
    output = run(
        "datasets/build_kinetics_lists.py",
        tmp_path,
        tmp_path / "out",
        "--val",
        tmp_path / "k400.csv",
        expect=2,
    )
    assert expected in output and "Traceback" not in output


def test_annotations_without_videos(tmp_path):
    annotations = tmp_path / "k400.csv"
    annotations.write_text("label,youtube_id,time_start,time_end\nx,y,1,2\n")
    arguments = (tmp_path, tmp_path / "out", "--val", annotations)
    output = run("datasets/build_kinetics_lists.py", *arguments, expect=2)
    assert f"{tmp_path}: no videos" in output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["kinetics", "ssv2"])
def test_folder_without_annotated_videos(tmp_path, kind, capsys):
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "other.mp4").touch()
    out = tmp_path / "out"
    if kind == "kinetics":
        annotations = tmp_path / "k400.csv"
        annotations.write_text("label,youtube_id,time_start,time_end\nx,y,1,2\n")
        words = [tmp_path / "videos", out, "--val", annotations]
        expected = "1 annotated video; the first is y_000001_000002"
    else:
        write_annotations(tmp_path, train=[("1", 0)], validation=[("3", 1)])
        words = [tmp_path, tmp_path / "videos", out]
        expected = "2 annotated videos; the first is 1"
    assert main(["data", f"lists-{kind}", *map(str, words)]) == 2
    error = f"{tmp_path / 'videos'}: has none of the {expected}"
    assert error in capsys.readouterr().err
    assert not list(out.glob("*.csv"))


def test_annotations_are_not_replaced_by_lists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "y.mp4", 2)
    content = "label,youtube_id,time_start,time_end\nx,y,1,2\n"
    for name in ("train.csv", "k400.csv"):
        Path(name).write_text(content)
    for flags in (["--train", "train.csv"], ["--train", "k400.csv", "--val", "train.csv"]):
        assert main(["data", "lists-kinetics", ".", ".", *flags]) == 2
        assert "would replace the annotation file train.csv" in capsys.readouterr().err
        assert Path("train.csv").read_text() == content


def folder_of_classes(folder, **counts):
    for name, count in counts.items():
        (folder / name / "taken in may").mkdir(parents=True)
        for number in range(count):
            below = folder / name / ("taken in may" if number % 2 else "")
            (below / f"{number}.{'MP4' if number % 3 else 'webm'}").touch()
        (folder / name / "notes.txt").touch()
        (folder / name / "._0.mp4").touch()


def test_folder_lists(tmp_path):
    folder_of_classes(tmp_path / "my clips", opening=23, closing=3)
    (tmp_path / "my clips" / ".cache").mkdir()
    output = run("datasets/build_folder_lists.py", tmp_path / "my clips", tmp_path / "out")
    assert "2 classes (set MODEL.NUM_CLASSES" in output
    assert json.loads((tmp_path / "out/classes.json").read_text()) == ["closing", "opening"]
    paths = []
    for split, labels in (("train", [0] + [1] * 19), ("val", [0, 1, 1]), ("test", [0, 1, 1])):
        assert f"{split}: {len(labels)} videos" in output
        dataset = Kinetics(
            config(DATA__PATH_TO_DATA_DIR=str(tmp_path / "out"), MODEL__NUM_CLASSES=2), split
        )
        assert dataset.labels == labels
        for path, label in zip(dataset.paths, labels):
            assert ("closing", "opening")[label] in path and os.path.exists(path)
        paths += dataset.paths
    assert len(set(paths)) == len(paths) == 26
    before = (tmp_path / "out/train.csv").read_bytes()
    run("datasets/build_folder_lists.py", tmp_path / "my clips", tmp_path / "out")
    assert (tmp_path / "out/train.csv").read_bytes() == before


@pytest.mark.parametrize(
    "counts, expected", [({}, "one folder per class"), ({"a": 3, "b": 2}, "b: 2 videos")]
)
def test_too_few_videos(tmp_path, counts, expected):
    folder_of_classes(tmp_path, **counts)
    out = tmp_path.parent / f"{tmp_path.name}_lists"
    output = run("datasets/build_folder_lists.py", tmp_path, out, expect=2)
    assert expected in output and len(output.strip().splitlines()) == 1 and not out.exists()


def folder_lists(folder: Path, *flags: str) -> dict[str, list[str]]:
    """The names of the videos in each list."""
    assert main(["data", "lists-folder", str(folder / "clips"), str(folder / "out"), *flags]) == 0
    lists = {}
    for split in ("train", "val", "test"):
        lines = (folder / "out" / f"{split}.csv").read_text().splitlines()
        paths = [line.rpartition(" ")[0] for line in lines]
        lists[split] = [os.path.relpath(path, folder / "clips") for path in paths]
    return lists


def test_shares_and_seed_of_folder_lists(tmp_path, capsys):
    for number in range(16):
        for name in ("open", "close"):
            (tmp_path / "clips" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "clips" / name / f"{number}.mp4").touch()
    plain = folder_lists(tmp_path)
    assert [len(names) for names in plain.values()] == [24, 4, 4]
    assert folder_lists(tmp_path, "--seed", "1") != plain == folder_lists(tmp_path)
    shares = folder_lists(tmp_path, "--val-share", "0.25", "--test-share", "0.5")
    assert [len(names) for names in shares.values()] == [8, 8, 16]
    command = ["data", "lists-folder", str(tmp_path / "clips"), str(tmp_path / "out")]
    for share in ("0", "0.9", "-1", "nan"):
        assert main([*command, "--val-share", share]) == 2
        assert "sum below 1" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_folder_lists(tmp_path, seed):
    """A scene is in one list, even if it has videos of several classes."""
    rng = random.Random(seed)
    scenes = [f"s{number}" for number in range(12)]
    for name in ("open", "close", "push"):
        for number in range(60):
            folder = tmp_path / "clips" / name / rng.choice(scenes)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{rng.choice(scenes)}_{number}.mp4").touch()
    for group, part in (("^[^/]+", 1), (r"(s\d+)_\d+\.mp4$", 2)):
        flags = ("--group", group, "--seed", str(seed), "--val-share", "0.2")
        lists = folder_lists(tmp_path, *flags)
        assert sum(map(len, lists.values())) == 180
        found = {
            split: {path.split("/")[part].split("_")[0] for path in paths}
            for split, paths in lists.items()
        }
        assert not found["train"] & (found["val"] | found["test"])
        assert not found["val"] & found["test"]
        for split, least in (("train", 1), ("val", 12), ("test", 6)):
            counts = Counter(path.split("/")[0] for path in lists[split])
            assert len(counts) == 3 and min(counts.values()) >= least


def test_last_group_of_a_class_stays_in_training(tmp_path):
    """Also if the share of the validation set is larger than a group."""
    (tmp_path / "clips" / "a").mkdir(parents=True)
    for number in range(9):
        (tmp_path / "clips" / "a" / f"{number % 3}_{number}.mp4").touch()
    lists = folder_lists(tmp_path, "--group", "^.", "--val-share", "0.6")
    assert [len(names) for names in lists.values()] == [3, 3, 3]


def test_groups_that_cannot_be_divided(tmp_path, capsys):
    for number in range(9):
        (tmp_path / "clips" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "clips" / "a" / f"{number % 2}_{number}.mp4").touch()
    command = ["data", "lists-folder", str(tmp_path / "clips"), str(tmp_path / "out")]
    for group, reason in (("^.", "9 videos are in 2 groups; too few"), ("x", "does not match")):
        assert main([*command, "--group", group]) == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "--group", "("])
    assert "regular expression" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ssv2_lists_of_videos(tmp_path):
    write_annotations(tmp_path, train=[("1", 0), ("2", 1)], validation=[("3", 1)])
    (tmp_path / "videos").mkdir()
    for name in ("1", "3"):
        write_video(
            tmp_path / "videos" / f"{name}.webm",
            10,
            codec="libvpx-vp9",
            options={"deadline": "realtime"},
        )
    output = run("datasets/build_ssv2_lists.py", tmp_path, tmp_path / "videos", tmp_path / "out")
    assert "train: 1 of 2 videos found, 1 missing" in output
    assert (tmp_path / "out/missing_train.txt").read_text() == "2\n"
    cfg = config(DATA__PATH_TO_DATA_DIR=str(tmp_path / "out"), TEST__DATASET="Ssv2")
    assert Ssv2(cfg, "train").labels == [0] and Ssv2(cfg, "test")[0].error is None
    assert names_in(str(tmp_path / "out"), len(TEMPLATES)) == TEMPLATES
    assert names_in(str(tmp_path), len(TEMPLATES)) == TEMPLATES  # the official files
    output = run("datasets/build_ssv2_lists.py", tmp_path, tmp_path / "videos", tmp_path, expect=2)
    assert "error: OUT is ANNOTATIONS" in output


def test_ssv2_lists_of_frames(synthetic_frames, tmp_path):
    output = run(
        "datasets/build_ssv2_lists.py",
        synthetic_frames,
        synthetic_frames / "frames",
        tmp_path,
        "--classes",
        "5",
    )
    assert "train: 20 of 20 videos found, 0 missing" in output
    cfg = config(DATA__PATH_TO_DATA_DIR=str(synthetic_frames))
    theirs = Ssv2(cfg, "train")
    cfg.DATA.PATH_TO_DATA_DIR = str(tmp_path)
    ours = Ssv2(cfg, "train")
    assert (ours.paths, ours.labels) == (theirs.paths, theirs.labels)
    assert bool((ours[3].clip == theirs[3].clip).all())


def test_check_videos_resumes(tmp_path):
    good = write_video(tmp_path / "good one.mp4", 10)
    cut = tmp_path / "empty.mp4"
    cut.touch()
    damaged = tmp_path / "damaged.ts"
    content = bytearray(write_video(damaged, 30, codec="mpeg2video").read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    damaged.write_bytes(content)
    (tmp_path / "list.csv").write_text(f"\n{good.name} 0\n{cut.name} 1\nabsent.mp4 2\n")
    out = tmp_path / "bad.txt"
    output = run("datasets/check_videos.py", out, tmp_path / "list.csv", tmp_path, expect=1)
    assert "4 videos, " in output
    bad = dict(line.split("\t") for line in out.read_text().splitlines())
    assert {str(cut), str(tmp_path / "absent.mp4")} <= set(bad) and str(good) not in bad
    progress = tmp_path / "bad.txt.progress"
    lines = progress.read_text().splitlines()
    assert len(lines) == 4
    # Stopped in the middle of a line: good videos of complete lines are not decoded again.
    kept = [line for line in lines if str(good) in line or str(cut) in line]
    progress.write_text("\n".join(kept) + '\n["' + str(damaged))
    status = good.stat()
    good.write_bytes(bytes(status.st_size))
    os.utime(good, ns=(status.st_atime_ns, status.st_mtime_ns))
    run("datasets/check_videos.py", out, tmp_path / "list.csv", tmp_path, expect=1)
    again = dict(line.split("\t") for line in out.read_text().splitlines())
    assert again == bad  # the good video is unchanged according to its size and time
    assert len({json.loads(line)[0] for line in progress.read_text().splitlines()}) == 4


def test_bad_and_changed_videos_are_checked_again(tmp_path):
    names = [str(tmp_path / f"{number}.mp4") for number in range(3)]
    for name in names[1:]:
        write_video(Path(name), 5)
    Path(names[0]).touch()
    bad, videos = str(tmp_path / "bad.txt"), str(tmp_path / "list.csv")
    Path(videos).write_text("".join(f"{name} 0\n" for name in names))

    def check() -> list[str]:
        assert main(["data", "check", bad, videos]) == 1
        return [line.split("\t")[0] for line in Path(bad).read_text().splitlines()]

    assert check() == names[:1]
    write_video(Path(names[0]), 5)
    status = os.stat(names[1])
    Path(names[1]).write_bytes(bytes(status.st_size))
    os.utime(names[1], ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert check() == names[1:2]
    assert main(["data", "drop-bad", bad, videos]) == 0
    assert Path(videos).read_text() == f"{names[0]} 0\n{names[2]} 0\n"


def test_check_videos_does_not_replace_other_files(tmp_path, capsys):
    write_video(tmp_path / "a.mp4", 2)
    train, val = tmp_path / "train.csv", tmp_path / "val.csv"
    for path in (train, val):
        path.write_text("a.mp4 0\n")
    assert main(["data", "check", str(train), str(val)]) == 2
    assert f"{train}.progress is missing" in capsys.readouterr().err
    assert train.read_text() == "a.mp4 0\n"


def test_check_videos_names_the_prefix_if_no_video_exists(synthetic, tmp_path, capsys):
    lists = tmp_path / "lists"
    lists.mkdir()
    text = (synthetic / "val.csv").read_text().replace(f"{synthetic}/", "")
    (lists / "val.csv").write_text(text)
    arguments = ["data", "check", str(tmp_path / "bad.txt"), str(lists / "val.csv")]
    assert main(arguments) == 1
    assert "--prefix" in capsys.readouterr().err
    assert main([*arguments, "--prefix", str(synthetic)]) == 0
    assert capsys.readouterr().err.count("error") == 0


def test_check_videos_refuses_lists_of_frames(synthetic_frames, tmp_path, capsys):
    """Its lines are no paths of videos; `drop-bad` would remove nothing."""
    bad, videos = tmp_path / "bad.txt", synthetic_frames / "train.csv"
    assert main(["data", "check", str(bad), str(videos)]) == 2
    assert f"{videos}: lists extracted frames" in capsys.readouterr().err
    assert not bad.exists()


def test_check_videos_with_unprintable_names(tmp_path):
    names = [os.fsencode(tmp_path / "a.mp4"), os.fsencode(tmp_path) + b"/b\xff.mp4"]
    for name in (*names, os.fsencode(tmp_path / "c\nd.mp4")):
        with open(name, "wb") as file:
            file.write(b"no video")
    run("datasets/check_videos.py", tmp_path / "bad.txt", tmp_path, expect=1)
    bad = (tmp_path / "bad.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in bad] == [
        f"{tmp_path}/{name}" for name in ("a.mp4", "b\\udcff.mp4", "c\\nd.mp4")
    ]


def test_check_videos_without_bad_ones(synthetic, tmp_path):
    output = run("datasets/check_videos.py", tmp_path / "bad.txt", synthetic / "val.csv")
    assert "13 videos, 0 bad" in output and (tmp_path / "bad.txt").read_text() == ""


def test_drop_bad_videos_from_lists(tmp_path, capsys):
    write_video(tmp_path / "a b.mp4", 5)
    (tmp_path / "em\tpty.mp4").touch()
    for split, names in {"train": ["a b", "em\tpty", "absent"], "val": ["a b"]}.items():
        lines = [f"{name}.mp4 {label}\n" for label, name in enumerate(names)]
        (tmp_path / f"{split}.csv").write_text("\n" + "".join(lines))
    bad, train, val = (str(tmp_path / name) for name in ("bad.txt", "train.csv", "val.csv"))
    assert main(["data", "check", bad, train, val]) == 1
    assert main(["data", "drop-bad", bad, train, val]) == 0
    printed = capsys.readouterr().out
    assert "dropped 2 of 3" in printed and "dropped 0 of 1" in printed
    assert Path(train).read_text() == "a b.mp4 0\n"
    assert Path(val).read_text() == "\na b.mp4 0\n"  # unchanged
    Path(bad).write_text(f"{tmp_path}/a b.mp4\n")
    assert main(["data", "drop-bad", bad, train]) == 2
    assert Path(train).read_text() == "a b.mp4 0\n"
    assert "no line would remain" in capsys.readouterr().err


def test_drop_bad_with_the_separator_and_prefix_of_the_lists(tmp_path, capsys, monkeypatch):
    (tmp_path / "videos").mkdir()
    write_video(tmp_path / "videos" / "a.mp4", 5)
    (tmp_path / "videos" / "b.mp4").touch()
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text("a.mp4,0\nb.mp4,1\n")
    Path("val.csv").write_text("b.mp4,1\n")
    options = ["--separator", ",", "--prefix", str(tmp_path / "videos")]
    assert main(["data", "check", "bad.txt", "train.csv", *options]) == 1
    # If a list would become empty, no list is changed.
    assert main(["data", "drop-bad", "bad.txt", "train.csv", "val.csv", *options]) == 2
    assert Path("train.csv").read_text() == "a.mp4,0\nb.mp4,1\n"
    assert main(["data", "drop-bad", "bad.txt", "train.csv", *options]) == 0
    assert Path("train.csv").read_text() == "a.mp4,0\n"
