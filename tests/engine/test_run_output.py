"""What a run reports to people: lines of epochs and of its end, names of classes, W&B."""

from __future__ import annotations

import json
import re
import sys
import types

import pytest
import torch

from slowfast_lara.config import load_config
from slowfast_lara.data.loader import val_loader
from slowfast_lara.models import build_model
from slowfast_lara.runs.checkpoint import load, load_weights
from tests.helpers.commands import run as main
from tests.helpers.runs import copy_lists, json_stats, write_config

pytestmark = pytest.mark.usefixtures("in_process")
NAMES = ["walk", "run & jump", "fly"]


def named_lists(folder, video_set):
    lists = copy_lists(folder / "lists", video_set)
    (lists / "classes.json").write_text(json.dumps(NAMES))
    return lists


@pytest.fixture(scope="module")
def finished(tmp_path_factory, video_set):
    """A config and the output folder of a run with training and test."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(
        folder / "c.yaml",
        named_lists(folder, video_set),
        folder / "out",
        TRAIN__BATCH_SIZE=6,  # of 16 videos
        TRAIN__EVAL_PERIOD=2,
        TRAIN__CHECKPOINT_BEST=True,
        SOLVER__MAX_EPOCH=3,
    )
    assert main(["--cfg", str(config)]) == 0
    return config, folder / "out"


def log_of(output) -> list[str]:
    """The messages in the log, without their prefix."""
    lines = (output / "stdout.log").read_text().splitlines()
    return [re.sub(r"^\[.*?\]\[\w+\] \S+ \d+: ", "", line) for line in lines]


def test_each_epoch_has_a_line_for_people(finished):
    lines = [line for line in log_of(finished[1]) if line.startswith("Epoch ")]
    assert [line.split(":")[0] for line in lines] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
    assert ["val loss" in line for line in lines] == [False, True, True]
    stats = {
        (s["_type"], s["epoch"]): s
        for s in json_stats(finished[1])
        if s.get("_type") in ("train_epoch", "val_epoch")
    }
    for kind, prefix in (("train_epoch", ""), ("val_epoch", "val ")):
        values = stats[kind, "2/3"]
        assert f" {prefix}loss {values['loss']:.3f}" in lines[1]
        assert f" {prefix}top-1 {100 - values['top1_err']:.1f} %" in lines[1]


def test_a_run_ends_with_lines_for_people(finished):
    lines = log_of(finished[1])
    (final,) = (i for i, line in enumerate(lines) if "test_final" in line)
    last = lines[final + 1 :]
    results = json.loads((finished[1] / "test_results.json").read_text())
    text = "\n".join(last)
    assert len(last) >= 2 and not any("json_stats" in line for line in last)
    assert f"top-1 {results['top1_acc']:.2f} %" in text and "7 videos" in text
    best = load(str(finished[1] / "checkpoints" / "best.pyth"))
    accuracy = f"{100 - best['val']['top1_err']:.1f} %"
    assert "checkpoint_epoch_00003.pyth (last)" in text
    assert f"best.pyth (epoch {best['epoch'] + 1}, val top-1 {accuracy})" in text
    assert last[-1].endswith("uses best.pyth")
    assert json_stats(finished[1])[-1]["split"] == "test_final"


def test_end_of_a_training_without_a_best_checkpoint(tmp_path, video_set):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", TEST__ENABLE=False)
    assert main(["--cfg", str(config)]) == 0
    *_, checkpoints, used = log_of(tmp_path / "out")
    assert checkpoints.endswith(": checkpoint_epoch_00002.pyth (last)")
    assert used.endswith("uses the last")
    assert "leaves out" not in "\n".join(log_of(tmp_path / "out"))


def test_unused_image_weights_are_reported(tmp_path, video_set):
    config = write_config(
        tmp_path / "c.yaml", video_set, tmp_path / "out", TEST__ENABLE=False, SOLVER__MAX_EPOCH=1
    )
    words = ["VIT.IM_PRETRAINED", "False", "VIT.PRETRAINED_WEIGHTS", "image.pth"]
    assert main(["--cfg", str(config), *words]) == 0
    lines = (tmp_path / "out/stdout.log").read_text()
    assert "Ignoring VIT.PRETRAINED_WEIGHTS image.pth: VIT.IM_PRETRAINED is False" in lines


def test_clips_that_do_not_fill_a_batch_are_reported(finished):
    (line,) = (line for line in log_of(finished[1]) if "batches per epoch" in line)
    assert "2 batches per epoch" in line and "leaves out 4 of 16 clips" in line


def test_classes_without_videos_are_reported(finished, tmp_path, video_set):
    """Of hand-written lists without classes.json, only the labels give the number of classes."""
    warning = "The training list has videos of only "
    assert not any(warning in line for line in log_of(finished[1]))
    changes = {"MODEL__NUM_CLASSES": 5, "SOLVER__MAX_EPOCH": 1, "TEST__ENABLE": False}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    assert main(["--cfg", str(config)]) == 0
    assert f"{warning}3 of 5 classes (MODEL.NUM_CLASSES)" in log_of(tmp_path / "out")


def test_results_have_class_names(finished):
    results = json.loads((finished[1] / "test_results.json").read_text())
    for video in results["videos"]:
        assert video["label_name"] == NAMES[video["label"]]
        assert video["top5_names"] == [NAMES[number] for number in video["top5"]]
    assert {int(label): row["name"] for label, row in results["per_class"].items()} == dict(
        enumerate(NAMES)
    )


def test_results_without_class_names(tmp_path, video_set):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", SOLVER__MAX_EPOCH=1)
    assert main(["--cfg", str(config)]) == 0
    assert "_name" not in (tmp_path / "out" / "test_results.json").read_text()


def test_validation_loss(finished):
    """The mean cross-entropy over the videos, without label smoothing."""
    cfg = load_config(finished[0], ["OUTPUT_DIR", str(finished[1])])
    model = build_model(cfg).eval()
    path = str(finished[1] / "checkpoints" / "checkpoint_epoch_00003.pyth")
    load_weights(model, load(path)["model_state"], path)
    losses = []
    with torch.no_grad():
        for batch in val_loader(cfg, batch_size=1):
            losses.append(-model(batch.clips)[0, batch.labels[0]].double().log())
    stats = [s for s in json_stats(finished[1]) if s.get("_type") == "val_epoch"]
    assert stats[-1]["loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)


@pytest.fixture()
def wandb(monkeypatch):
    """A module in place of wandb; records the arguments of `init` and the logged values."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(origin="wandb/__init__.py")
    module.inits, module.logged, module.ended = [], [], 0

    class Run:
        id = "abc123"

        def define_metric(self, *args, **options):
            pass

        def log(self, values):
            module.logged.append(values)

        def finish(self):
            module.ended += 1

    def init(**options):
        module.inits.append(options)
        return Run()

    module.init, module.Settings = init, dict
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb(tmp_path, video_set, wandb):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", TEST__ENABLE=False)
    assert main(["--cfg", str(config)]) == 0 and not wandb.inits  # off by default
    for epochs in (3, 4):  # starts, resumes
        changes = ["WANDB.ENABLE", "True", "SOLVER.MAX_EPOCH", str(epochs)]
        assert main(["--cfg", str(config), *changes, "TRAIN.ACCEPT_CHANGES", "True"]) == 0
    assert [options["id"] for options in wandb.inits] == [None, "abc123"] and wandb.ended == 2
    assert wandb.inits[0]["config"]["VIT"]["EMBED_DIM"] == 24
    stats = json_stats(tmp_path / "out")
    for kind, name in (("train_epoch", "train_epoch"), ("val_epoch", "val")):
        logged = {v["batch"]: v[f"{name}/loss"] for v in wandb.logged if f"{name}/loss" in v}
        expected = [s["loss"] for s in stats if s.get("_type") == kind and s["epoch"] == "4/4"]
        assert logged[16] == pytest.approx(expected[-1], abs=1e-6)


def test_wandb_that_does_not_start(tmp_path, video_set, wandb, capsys):
    def init(**options):
        raise RuntimeError("No API key\nmore")

    wandb.init = init
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", WANDB__ENABLE=True)
    assert main(["--cfg", str(config)]) == 2
    error = capsys.readouterr().err
    assert "WANDB.ENABLE" in error and "No API key" in error and error.count("\n") == 1


@pytest.mark.parametrize("folder", [False, True])
def test_wandb_not_installed(tmp_path, video_set, monkeypatch, capsys, folder):
    """W&B writes its logs to a folder of this name; Python takes it for a package."""
    paths = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *paths])
    if folder:
        (tmp_path / "wandb").mkdir()
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", WANDB__ENABLE=True)
    assert main(["--cfg", str(config)]) == 2
    error = capsys.readouterr().err
    assert "WANDB.ENABLE" in error and "pip install 'slowfast_lara[wandb]'" in error
    assert not (tmp_path / "out").exists()
