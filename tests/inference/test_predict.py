"""The `predict` command: scores, JSON, CSV and annotated videos; bad input."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.data import load_views
from slowfast_lara.errors import InputError
from slowfast_lara.files import atomic_write
from slowfast_lara.inference.load import load
from slowfast_lara.inference.videos import find_videos, output_paths
from slowfast_lara.models import build_model
from slowfast_lara.runs import checkpoint
from tests.helpers.commands import predict as main
from tests.helpers.runs import finish, start
from tests.helpers.small_models import (
    NAMES,
    ROOT,
    ModelFiles,
    files_of_at_most,
    make_videos,
    only_error,
    small_config,
    write_model,
)


def reference_scores(model: ModelFiles, video: str, *opts: object) -> np.ndarray:
    """Softmax scores averaged over the views, one view at a time."""
    cfg = load_config(model.cfg, opts)
    network = build_model(cfg).eval()
    network.load_state_dict(checkpoint.load(model.checkpoint)["model_state"])
    with torch.no_grad():
        scores = [network([view[None]])[0].double() for view in load_views(video, cfg)]
    return torch.stack(scores).mean(0).numpy()


@pytest.mark.parametrize(("views", "num_clips", "crops"), [(1, 1, 1), (10, 10, 1), (30, 10, 3)])
def test_scores_are_means_over_views(
    model, clips, names, tmp_path, capsys, views, num_clips, crops
):
    out_json, out_csv = tmp_path / "new" / "p.json", tmp_path / "p.csv"
    code = main(
        [
            *model.flags(),
            "--views",
            str(views),
            "--classes",
            names,
            clips[0],
            "--json",
            str(out_json),
            "--csv",
            str(out_csv),
            clips[1],
        ]
    )
    assert code == 0
    printed = capsys.readouterr().out
    content = json.loads(out_json.read_text())
    rows = list(csv.DictReader(out_csv.open(encoding="utf-8")))
    assert content["failed"] == [] and content["checkpoint"] == model.checkpoint
    assert [entry["path"] for entry in content["videos"]] == clips[:2]
    assert len(rows) == 10 and not any(row["error"] for row in rows)
    for number, entry in enumerate(content["videos"]):
        expected = reference_scores(
            model,
            entry["path"],
            "TEST.NUM_ENSEMBLE_VIEWS",
            num_clips,
            "TEST.NUM_SPATIAL_CROPS",
            crops,
        )
        best = np.argsort(-expected)[:5]
        assert entry["num_views"] == views
        assert entry["top5"] == best.tolist()
        assert entry["top5_names"] == [NAMES[i] for i in best]
        np.testing.assert_allclose(entry["top5_scores"], expected[best], atol=1e-6)
        assert f"{entry['path']}\n  1. {expected[best[0]]:6.1%}  {NAMES[best[0]]}\n" in printed
        for rank, row in enumerate(rows[5 * number : 5 * number + 5]):
            assert (row["path"], row["rank"]) == (entry["path"], str(rank + 1))
            assert (int(row["class"]), row["name"]) == (best[rank], NAMES[best[rank]])
            assert float(row["score"]) == entry["top5_scores"][rank]


def test_undecodable_file_names(model, clips, tmp_path, capsys):
    video = os.path.join(tmp_path, os.fsdecode(b"\xff \n.mp4"))
    shutil.copy(clips[0], video)
    out = [tmp_path / name for name in ("p.json", "p.csv", "copy.mp4")]
    flags = [f"--{flag}={path}" for flag, path in zip(("json", "csv", "video-out"), out)]
    assert main([*model.flags(), video, "--views", "1", *flags]) == 0
    assert r"\udcff \n.mp4" in capsys.readouterr().out
    assert json.loads(out[0].read_text())["videos"][0]["path"] == video
    rows = list(csv.DictReader(out[1].open(encoding="utf-8", newline="")))
    assert rows[0]["path"] == os.path.join(tmp_path, "\\udcff \n.mp4")


def test_csv_has_no_formulas(model, clips, tmp_path, monkeypatch):
    """Spreadsheets run cells that start with these characters, even if the cell is quoted."""
    monkeypatch.chdir(tmp_path)
    signs = ["=", "+", "-", "@", "\t=", "\r="]
    names = [f"{sign}HYPERLINK(1)" for sign in signs]
    (tmp_path / "names.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    for sign in "=+@":
        shutil.copy(clips[0], f"{sign}cmd.mp4")
        Path(f"{sign}bad.mp4").write_text("no video")
    videos = [path.name for path in tmp_path.glob("*.mp4")]
    flags = ["--views", "1", "--classes", "names.json", "--csv", "p.csv", "--json", "p.json"]
    assert main([*model.flags(), *flags, *videos]) == 2
    with open("p.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 3 * 5 + 3
    assert not [cell for row in rows for cell in row if cell[:1] in tuple("=+-@\t\r")]
    content = json.loads(Path("p.json").read_text())  # JSON has the names as they are
    assert {entry["path"] for entry in content["videos"]} == {f"{sign}cmd.mp4" for sign in "=+@"}
    assert all(name.strip() in names for name in content["videos"][0]["top5_names"][:1])


def test_arrays_of_scores_and_features(model, clips, names, tmp_path):
    out, bad = tmp_path / "new" / "out.npz", tmp_path / "bad.mp4"
    bad.write_text("no video")
    flags = ["--views", "3", "--classes", names, "--npz", str(out)]
    assert main([*model.flags(), *flags, clips[0], str(bad), clips[1]]) == 2
    loaded = load(model.cfg, model.checkpoint)
    with np.load(out) as arrays:  # refuses pickled objects
        assert arrays["paths"].tolist() == clips[:2] and arrays["class_names"].tolist() == NAMES
        assert arrays["num_views"].tolist() == [3, 3]
        for video, scores, features in zip(clips, arrays["scores"], arrays["features"]):
            assert np.array_equal(scores, loaded(video, views=3).scores)
            assert np.array_equal(features, loaded.features(video, views=3))
    assert main([*model.flags(), "--stream", "--npz", str(out), clips[0]]) == 2


def test_arrays_without_videos(model, tmp_path, capsys):
    (tmp_path / "bad.mp4").write_text("no video")
    (tmp_path / "file").touch()
    out = tmp_path / "out.npz"
    assert main([*model.flags(), "--npz", str(out), str(tmp_path / "bad.mp4")]) == 2
    with np.load(out) as arrays:
        assert len(arrays["paths"]) == 0 and arrays["scores"].shape == (0, len(NAMES))
    capsys.readouterr()
    unwritable = str(tmp_path / "file" / "out.npz")
    assert main([*model.flags(), "--npz", unwritable, str(tmp_path / "bad.mp4")]) == 2
    assert "file" in only_error(capsys)


def test_full_disk_is_not_reported_as_a_bad_video(model, clips, tmp_path, capsys):
    for number in range(3):  # FFmpeg used to crash at the second or third
        with files_of_at_most(2_000):
            out = str(tmp_path / f"{number}.mp4")
            assert main([*model.flags(), clips[0], "--views", "1", "--video-out", out]) == 1
        assert only_error(capsys).endswith("File too large")
        with files_of_at_most(100):
            out = str(tmp_path / "p.json")
            assert main([*model.flags(), clips[0], "--views", "1", "--json", out]) == 2
        assert only_error(capsys) == f"error: {out}: File too large"
    assert os.listdir(tmp_path) == []


def test_overrides_anywhere_on_the_command_line(model, clips, tmp_path):
    out = tmp_path / "p.json"
    assert (
        main(
            [
                "TEST.NUM_SPATIAL_CROPS",
                "1",
                *model.flags(),
                clips[0],
                "--opts",
                "TEST.NUM_ENSEMBLE_VIEWS",
                "5",
                "--json",
                str(out),
                "RNG_SEED",
                "3",
            ]
        )
        == 0
    )
    (entry,) = json.loads(out.read_text())["videos"]
    assert entry["num_views"] == 5
    assert entry["top5_names"][0] == f"class {entry['top5'][0]}"


@pytest.mark.parametrize(
    "form", ["list", "object", "text numbers", "lines", "in the data's folder"]
)
def test_formats_of_class_names(model, clips, tmp_path, capsys, form):
    file = tmp_path / "classes.json"
    content = {
        "list": json.dumps(NAMES),
        # PySlowFast's files have quotes in the names; Something-Something's, numbers as text.
        "object": json.dumps(
            {
                f'"{name}"' if " " not in name else name: number
                for number, name in reversed(list(enumerate(NAMES)))
            }
        ),
        "text numbers": json.dumps({name: str(number) for number, name in enumerate(NAMES)}),
        "lines": "\n".join(NAMES) + "\n\n",
        "in the data's folder": json.dumps(NAMES),
    }[form]
    file.write_text(content, encoding="utf-8")
    given = (
        ["DATA.PATH_TO_DATA_DIR", str(tmp_path)]
        if form == "in the data's folder"
        else ["--classes", str(file)]
    )
    assert main([*model.flags(), *given, clips[0], "--views", "1"]) == 0
    expected = reference_scores(
        model, clips[0], "TEST.NUM_ENSEMBLE_VIEWS", 1, "TEST.NUM_SPATIAL_CROPS", 1
    )
    lines = capsys.readouterr().out.splitlines()[1:]
    shown = [NAMES[i] for i in np.argsort(-expected)[:5]]
    assert [line.split("%  ")[1] for line in lines] == shown


def test_one_bad_video_in_a_folder(model, clips, tmp_path, capsys):
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    shutil.copy(clips[0], folder / "a.mp4")
    (folder / "b.mp4").write_text("not a video")
    shutil.copy(clips[1], folder / "deeper" / "c.mp4")
    (folder / ".hidden.mp4").write_text("")
    (folder / "notes.txt").write_text("clips of Monday")
    (folder / "deeper" / "thumbnail.jpg").write_bytes(b"")
    out, table = tmp_path / "p.json", tmp_path / "p.csv"
    assert main([*model.flags(), "--json", str(out), "--csv", str(table), str(folder)]) == 2
    assert f"{folder}/b.mp4" in only_error(capsys)
    content = json.loads(out.read_text())
    assert [entry["path"] for entry in content["videos"]] == [
        str(folder / "a.mp4"),
        str(folder / "deeper" / "c.mp4"),
    ]
    assert [entry["path"] for entry in content["failed"]] == [str(folder / "b.mp4")]
    errors = {row["path"]: row["error"] for row in csv.DictReader(table.open()) if row["error"]}
    assert errors == {entry["path"]: entry["reason"] for entry in content["failed"]}


def test_bad_input_is_one_line(model, clips, tmp_path, capsys):
    text = tmp_path / "text.mp4"
    text.write_text("not a video")
    (tmp_path / "empty").mkdir()
    short = tmp_path / "short.json"
    short.write_text(json.dumps(NAMES[:-1]))
    twice = tmp_path / "twice.json"
    twice.write_text(json.dumps({"a": 1, "b": 1}))
    torn = tmp_path / "torn.pyth"
    torn.write_bytes(Path(model.checkpoint).read_bytes()[:5000])
    other = write_model(tmp_path / "other", small_config(EMBED_DIM=48))
    out = tmp_path / "p.json"
    flags, video = [*model.flags(), "--json", str(out)], clips[0]
    cases = {
        str(text): [*flags, str(text)],
        "nowhere.mp4": [*flags, str(tmp_path / "nowhere.mp4")],
        str(tmp_path / "empty"): [*flags, str(tmp_path / "empty")],
        "no.json": [*flags, "--classes", str(tmp_path / "no.json"), video],
        "short.json names 5 classes": [*flags, "--classes", str(short), video],
        "both have number 1": [*flags, "--classes", str(twice), video],
        "does not fit": ["--cfg", model.cfg, "--checkpoint", other.checkpoint, video],
        "torn.pyth": ["--cfg", model.cfg, "--checkpoint", str(torn), video],
        "gone.pyth": ["--cfg", model.cfg, "--checkpoint", "gone.pyth", video],
        "gone.yaml": ["--cfg", "gone.yaml", "--checkpoint", model.checkpoint, video],
        "TEST.NUM_ENSEMBLE_VIEWS?": [*flags, video, "TEST.NUM_ENSEMBLE_VIEW", "2"],
        "RNG_SEED": [*flags, video, "RNG_SEED"],
        "NUM_GPUS is 9": [*flags, video, "NUM_GPUS", "9"],
        "1 to 30": [*flags, "--views", "31", video],
        "--views is 0": [*flags, "--views", "0", video],
        "needs --stream": [*flags, "--plot", str(tmp_path / "x.png"), video],
        "--window is -1": [*flags, "--stream", "--window", "-1", video],
        "is one of the input videos": [*flags, "--video-out", video, video],
        "give a folder": [*flags, "--video-out", str(tmp_path / "x.mp4"), *clips],
        "no video given for the model ": [*flags, "RNG_SEED", "1"],
        "--checkpoint": ["--cfg", model.cfg, video],
        "no run given": ["RNG_SEED", "1"],
        "nowhere: no such run": [str(tmp_path / "nowhere"), video],
        "holds no model config": [model.checkpoint, video],
        f"{text}: File exists": [*model.flags(), "--video-out", str(text / "x.mp4"), video],
    }
    before = Path(video).read_bytes()
    for message, argv in cases.items():
        assert main(argv) == 2, message
        assert message in only_error(capsys)
    assert Path(video).read_bytes() == before
    # Only commands that reached the videos wrote a file.
    assert [entry["path"] for entry in json.loads(out.read_text())["failed"]] == [
        str(tmp_path / "nowhere.mp4")
    ]
    assert not [name for name in os.listdir(tmp_path) if "writing" in name]


def test_annotated_copy(model, clips, names, tmp_path):
    folder = tmp_path / "copies"
    twin = tmp_path / "twin" / os.path.basename(clips[0])
    twin.parent.mkdir()
    shutil.copy(clips[1], twin)
    assert (
        main(
            [
                *model.flags(),
                "--classes",
                names,
                "--video-out",
                str(folder),
                "--stride",
                "0.2",
                "--window",
                "0.5",
                clips[0],
                str(twin),
            ]
        )
        == 0
    )
    stem = Path(clips[0]).stem
    assert sorted(os.listdir(folder)) == [f"{stem}.mp4", f"{stem}_2.mp4"]
    frames = _frames(folder / f"{stem}.mp4")
    assert len(frames) == 20
    height, width = frames[0].shape[:2]
    assert width >= 360 and height > width  # enlarged, with a panel below
    panels = np.stack([frame[width + 8 :] for frame in frames]).astype(float)
    change = np.abs(np.diff(panels, axis=0)).mean(axis=(1, 2, 3))
    # Windows end after 6 and 12 frames (partial), after 15, and at the last frame.
    assert panels[0].max() < 80 and change.argmax() == 4
    assert set(np.flatnonzero(change > 1)) <= {4, 10, 13, 18}
    picture = np.stack([frame[:width] for frame in frames]).astype(float)
    source = np.stack(_frames(clips[0])).astype(float)
    difference = picture.mean(axis=(1, 2)) - source.mean(axis=(1, 2))
    assert np.abs(difference).max() < 4


def test_copies_of_videos_with_one_name():
    videos = [f"{folder}/a.mkv" for folder in ("1", "2", "3")]
    assert output_paths("out", videos, ".mp4") == ["out/a.mp4", "out/a_2.mp4", "out/a_3.mp4"]


def test_copies_do_not_replace_other_inputs(tmp_path):
    videos = [str(tmp_path / name) for name in ("a.mkv", "a.mp4")]
    for video in videos:
        Path(video).touch()
    with pytest.raises(InputError, match=f"{videos[1]} is one of the input videos"):
        output_paths(str(tmp_path), videos, ".mp4")


def test_folders_with_images_next_to_videos(tmp_path):
    """Only a folder with visible images and without videos is a video."""
    names = ["a/1.mp4", "a/cover.jpg", "b/1.jpg", "b/._1.jpg", "c/._1.jpg", "c/sub/2.mp4"]
    names.append("b/sub/3.mp4")  # not searched: b is a video
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_videos([str(tmp_path)], frames_in_folders=True)
    assert found == [str(tmp_path / name) for name in ("a/1.mp4", "b", "c/sub/2.mp4")]


def _frames(path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_folder_of_frames(tmp_path):
    config = small_config()
    config["TRAIN"]["DATASET"] = config["TEST"]["DATASET"] = "ssv2"
    model = write_model(tmp_path / "model", config)
    frames = make_videos(tmp_path / "set", 2, "--frames", "12", "--form", "frames") / "frames"
    out = tmp_path / "p.json"
    assert (
        main(
            [
                *model.flags(),
                "--json",
                str(out),
                str(frames),
                "--video-out",
                str(tmp_path / "copies"),
            ]
        )
        == 0
    )
    paths = [entry["path"] for entry in json.loads(out.read_text())["videos"]]
    assert paths == [str(frames / "1"), str(frames / "2")]
    assert len(_frames(tmp_path / "copies" / "1.mp4")) == 12


def test_atomic_write(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_write(str(path)) as temporary:
        Path(temporary).write_text("half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file.txt"]
    with atomic_write(str(path)) as temporary:
        Path(temporary).write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file.txt"]


def test_tool_as_a_process(model, clips, tmp_path):
    """tools/predict.py, called from another folder."""
    (tmp_path / "no.mp4").write_text("x")
    tool = (str(ROOT / "tools" / "predict.py"), *model.flags())
    code, stdout, stderr = finish(start("no.mp4", clips[0], program=tool, folder=tmp_path))
    assert code == 2
    assert stderr.startswith("error: no.mp4: ") and stderr.count("\n") == 1
    assert stdout.startswith(f"{clips[0]}\n  1. ")
