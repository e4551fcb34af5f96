"""Resuming in an OUTPUT_DIR: which changes are allowed or refused, and one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from slowfast_lara.config.keys import Affects, all_keys
from slowfast_lara.engine.resume_policy import list_fingerprint
from slowfast_lara.inference.load import load
from slowfast_lara.locks import LOCK
from slowfast_lara.runs import checkpoint
from tests.helpers.commands import predict as predict_main
from tests.helpers.commands import run as main
from tests.helpers.runs import NUM_CLASSES, kill_group, load_checkpoint, start, write_config
from tests.helpers.small_models import only_error

pytestmark = pytest.mark.usefixtures("in_process")

LAST = "checkpoint_epoch_00001.pyth"
BASE = {"SOLVER__MAX_EPOCH": 1, "TEST__ENABLE": False}
TESTING = {"TRAIN__ENABLE": False, "TEST__ENABLE": True}


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory, video_set):
    """The folder of a finished training."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "c.yaml", video_set, folder / "out", **BASE)
    code = main(["--cfg", str(config)])
    assert code == 0
    return folder / "out"


@pytest.fixture()
def trained(trained_once, tmp_path):
    """A copy of `trained_once` that a test may change."""
    return Path(shutil.copytree(trained_once, tmp_path / "out"))


def run(video_set, output, **changes):
    config = write_config(output.parent / "again.yaml", video_set, output, **{**BASE, **changes})
    return main(["--cfg", str(config)])


def all_files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def assert_refused(capsys, video_set, output, *mentions, **changes):
    """A run exits with code 2 and one error line with all mentions, and changes no file."""
    before = all_files(output)
    capsys.readouterr()
    assert run(video_set, output, **changes) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1, errors
    for mention in mentions:
        assert str(mention) in errors[0]
    assert all_files(output) == before


@pytest.mark.parametrize(
    "affects, keys",
    [
        (Affects.WEIGHTS, "VIT.NUM_HEADS VIT.USE_ORIGINAL_TRAJ_ATTN_CODE"),
        (Affects.MODEL, "VIT.DEPTH VIT.HEAD_ACT VIT.POS_EMBED MODEL.NUM_CLASSES DATA.MEAN"),
        (Affects.MODEL, "DATA.NUM_FRAMES DATA.SAMPLING_RATE DATA.STD DATA.REVERSE_INPUT_CHANNEL"),
        (Affects.ATTENTION, "VIT.APPROX_ATTN_TYPE VIT.APPROX_ATTN_DIM VIT.LARA.BETA VIT.RA.BIASED"),
        (Affects.TRAINING, "VIT.DROP VIT.ATTN_DROPOUT RNG_SEED TRAIN.DATASET DATA.TRAIN_CROP_SIZE"),
        (Affects.TRAINING, "ALLOW_TF32 DATA.RANDOM_FLIP DATA.RAND_AUGMENT SOLVER.PRECISION"),
        (Affects.TRAINING, " ".join(key for key in all_keys() if key.startswith("SOLVER."))),
        (Affects.NOTHING, "DATA_LOADER.NUM_WORKERS LOG_PERIOD NUM_GPUS NUM_SHARDS SHARD_ID"),
        (
            Affects.NOTHING,
            "DIST_TIMEOUT OUTPUT_DIR CUDNN_BENCHMARK TENSORBOARD.ENABLE TEST.DATASET",
        ),
        (Affects.NOTHING, "TRAIN.BATCH_SIZE TRAIN.EVAL_PERIOD TRAIN.CHECKPOINT_KEEP VIT.KERNELS"),
        (Affects.NOTHING, "DATA.PATH_TO_DATA_DIR DATA.PATH_PREFIX VIT.PRETRAINED_WEIGHTS"),
    ],
)
def test_effect_of_a_change(affects, keys):
    assert {key: all_keys()[key].affects for key in keys.split()} == dict.fromkeys(
        keys.split(), affects
    )


@pytest.mark.parametrize(
    "changes, mention",
    [
        ({"SOLVER__WEIGHT_DECAY": 0.25}, "SOLVER.WEIGHT_DECAY was 0.0001, is now 0.25"),
        ({"SOLVER__OPTIMIZING_METHOD": "adam"}, "SOLVER.OPTIMIZING_METHOD was 'adamw'"),
        ({"SOLVER__OPTIMIZING_METHOD": "sgd"}, "is now 'sgd'"),
        ({"SOLVER__BASE_LR": 0.5}, "SOLVER.BASE_LR was 0.001, is now 0.5"),
        ({"SOLVER__MAX_EPOCH": 2}, "SOLVER.MAX_EPOCH was 1, is now 2"),
        ({"VIT__NUM_HEADS": 4}, "VIT.NUM_HEADS was 2, is now 4"),
        ({"VIT__APPROX_ATTN_TYPE": "lara", "VIT__APPROX_ATTN_DIM": 3}, "VIT.APPROX_ATTN_TYPE was"),
        ({"VIT__DROP": 0.1, "RNG_SEED": 7}, "VIT.DROP was 0.0, is now 0.1; RNG_SEED was 1"),
        ({"DATA__MEAN": [0.5, 0.5, 0.5]}, "DATA.MEAN was [0.45, 0.45, 0.45], is now [0.5, "),
    ],
)
def test_changed_training_settings_are_refused(trained, video_set, capsys, changes, mention):
    assert_refused(
        capsys, video_set, trained, mention, LAST, "TRAIN.ACCEPT_CHANGES True", **changes
    )


def copied_lists(video_set, folder):
    folder.mkdir()
    for split in ("train", "val", "test"):
        shutil.copy(video_set / f"{split}.csv", folder)
    return folder


@pytest.mark.parametrize("change", ["fewer", "order", "label"])
def test_changed_list_is_refused(trained, video_set, tmp_path, capsys, change):
    lists = copied_lists(video_set, tmp_path / "lists")
    lines = (lists / "train.csv").read_text().splitlines()
    path, label = lines[0].split()
    lines = {
        "fewer": lines[:-1],
        "order": lines[::-1],
        "label": [f"{path} {1 - int(label)}", *lines[1:]],
    }[change]
    (lists / "train.csv").write_text("\n".join(lines))
    assert_refused(capsys, lists, trained, "the training list was '16 videos, sha256 ")


def test_list_fingerprint_ignores_the_common_folder():
    paths = ["/a/set/x/1.mp4", "/a/set/y/2.mp4"]
    moved = [path.replace("/a/set", "/mnt/other") for path in paths]
    short = ["x/1.mp4", "y/2.mp4"]
    assert len({list_fingerprint(known, [0, 1]) for known in (paths, moved, short)}) == 1
    assert list_fingerprint(paths, [0, 1]) != list_fingerprint(paths, [1, 0])
    assert list_fingerprint(paths, [0, 1]) != list_fingerprint(paths[::-1], [1, 0])
    assert (
        list_fingerprint(paths[:1], [0])
        == list_fingerprint(["/b/1.mp4"], [0])
        != list_fingerprint(["/b/2.mp4"], [0])
    )


def test_changes_without_effect_are_allowed(trained, video_set, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(video_set, moved)
    for split in ("train", "val", "test"):
        text = (moved / f"{split}.csv").read_text()
        (moved / f"{split}.csv").write_text(text.replace(str(video_set), str(moved)))
    changes = {
        "DATA_LOADER__NUM_WORKERS": 1,
        "LOG_PERIOD": 3,
        "DIST_TIMEOUT": 99,
        "CUDNN_BENCHMARK": True,
        "TRAIN__BATCH_SIZE": 2,
        "TRAIN__EVAL_PERIOD": 1,
        "TRAIN__CHECKPOINT_PERIOD": 3,
        "TRAIN__DATASET": "Kinetics",
        "VIT__PRETRAINED_WEIGHTS": "elsewhere",
        "DATA__TEST_CROP_SIZE": 48,
        "TEST__ENABLE": True,
    }
    assert run(moved, trained, **changes) == 0
    assert "Training is" in (trained / "stdout.log").read_text()


def test_checkpoints_of_earlier_versions_resume(trained, video_set, capsys):
    """They lack the fingerprint of the list, and keys that were added later."""
    path = trained / "checkpoints" / LAST
    content = checkpoint.load(str(path))
    del content["train_list"]
    tree = yaml.safe_load(content["cfg"])
    del tree["VIT"]["LARA"], tree["SOLVER"]["ACCUMULATE_STEPS"]
    checkpoint.save(str(path), {**content, "cfg": yaml.safe_dump(tree)})
    assert run(video_set, trained) == 0
    assert_refused(capsys, video_set, trained, "VIT.LARA.BETA", **{"VIT__LARA": {"BETA": 0.5}})
    checkpoint.save(str(path), {key: content[key] for key in content if key != "cfg"})
    assert run(video_set, trained, SOLVER__WEIGHT_DECAY=0.25) == 0


@pytest.mark.parametrize("text", ["a: [", "- 1", "VIT: 3", "&a [*a]", "x: &a [*a]\nVIT: {DROP: 0}"])
def test_malformed_saved_config_gives_no_traceback(trained, video_set, capsys, text):
    path = str(trained / "checkpoints" / LAST)
    checkpoint.save(path, {**checkpoint.load(path), "cfg": text})
    assert run(video_set, trained) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


CORRUPTIONS = {
    "no state": lambda saved: saved.pop("state"),
    "no groups": lambda saved: saved.pop("param_groups"),
    "state of nothing": lambda saved: saved.update(state=None),
    "state as a list": lambda saved: saved.update(state=[1]),
    "state of text": lambda saved: saved.update(state={0: "x"}),
    "state of numbers": lambda saved: saved.update(state={0: 3}),
    "names of a wrong type": lambda saved: saved.update(state={0: {3: 1}}),
    "groups of text": lambda saved: saved.update(param_groups=["x"]),
    "groups without parameters": lambda saved: saved.update(param_groups=[{}, {}]),
    "no group": lambda saved: saved.update(param_groups=[]),
    "parameters of nothing": lambda saved: saved["param_groups"][0].update(params=None),
    "parameters of lists": lambda saved: saved["param_groups"][0].update(params=[[1]]),
    "a text for a mean": lambda saved: saved["state"][0].update(exp_avg="x"),
    "a mean of another shape": lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3)),
    "a step of another shape": lambda saved: saved["state"][0].update(step=torch.zeros(3)),
    "a mean alone": lambda saved: saved["state"][0].pop("exp_avg_sq"),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=list(CORRUPTIONS))
def test_malformed_optimizer_state_is_reported_in_one_line(trained, video_set, capsys, corrupt):
    path = str(trained / "checkpoints" / LAST)
    content = checkpoint.load(path)
    corrupt(content["optimizer_state"])
    checkpoint.save(path, content)
    assert_refused(capsys, video_set, trained, path, "optimi")


def test_malformed_scaler_state_is_reported_in_one_line(trained, video_set, capsys):
    path = str(trained / "checkpoints" / LAST)
    checkpoint.save(path, {**checkpoint.load(path), "scaler_state": {"scale": "x"}})
    assert_refused(capsys, video_set, trained, path, "scaler_state")


def test_best_checkpoint_without_an_error_rate_is_replaced(trained, video_set):
    best = str(trained / "checkpoints" / "best.pyth")
    content = checkpoint.load(str(trained / "checkpoints" / LAST))
    for val in ("x", {"top1_err": "x"}, {"top1_err": None}, {}):
        checkpoint.save(best, {**content, "val": val})
        assert run(video_set, trained, TRAIN__CHECKPOINT_BEST=True) == 0
        assert checkpoint.load(best)["val"]["top1_err"] >= 0


def accept(video_set, output, **changes):
    more = {"SOLVER__MAX_EPOCH": 2, "TRAIN__ACCEPT_CHANGES": True}
    assert run(video_set, output, **{**more, **changes}) == 0
    return load_checkpoint(output, "checkpoint_epoch_00002.pyth")


def test_accepted_weight_decay_is_applied(trained, video_set):
    plain = accept(video_set, Path(shutil.copytree(trained, trained.parent / "plain")))
    changed = accept(video_set, trained, SOLVER__WEIGHT_DECAY=0.25)
    decays = [group["weight_decay"] for group in changed["optimizer_state"]["param_groups"]]
    assert decays == [0.25, 0.0]
    sizes = [state["model_state"]["blocks.0.mlp.fc1.weight"].norm() for state in (changed, plain)]
    assert sizes[0] < sizes[1]
    assert "WEIGHT_DECAY was 0.0001, is now 0.25" in (trained / "stdout.log").read_text()
    assert "WEIGHT_DECAY: 0.25" in changed["cfg"]
    assert run(video_set, trained, SOLVER__MAX_EPOCH=2, SOLVER__WEIGHT_DECAY=0.25) == 0


@pytest.mark.parametrize("method", ["adam", "sgd"])
def test_accepted_optimizer_change_resets_its_state(trained, video_set, method):
    changed = accept(video_set, trained, SOLVER__OPTIMIZING_METHOD=method, SOLVER__MOMENTUM=0.5)
    assert "Resetting" in (trained / "stdout.log").read_text()
    states = changed["optimizer_state"]["state"].values()
    group = changed["optimizer_state"]["param_groups"][0]
    if method == "sgd":
        assert all(state.keys() == {"momentum_buffer"} for state in states)
        assert group["momentum"] == 0.5
    else:
        assert all(state["step"] == 4 for state in states)  # those of the second epoch
        assert not group.get("decoupled_weight_decay")


def test_extended_training_equals_an_uninterrupted_one(trained, video_set, tmp_path):
    steps = {
        "SOLVER__LR_POLICY": "steps_with_relative_lrs",
        "SOLVER__STEPS": [0],
        "SOLVER__LRS": [1],
    }
    long = tmp_path / "long"
    assert run(video_set, long, **steps, SOLVER__MAX_EPOCH=2) == 0
    short = tmp_path / "short"
    assert run(video_set, short, **steps) == 0
    extended = accept(video_set, short, **steps)["model_state"]
    straight = load_checkpoint(long, "checkpoint_epoch_00002.pyth")["model_state"]
    assert all(torch.equal(extended[name], straight[name]) for name in straight)


def test_swapped_attention_is_refused_unless_requested(trained, video_set, capsys):
    """Attention may be swapped in weights given by path, not in those of the same OUTPUT_DIR."""
    lara = {**TESTING, "VIT__APPROX_ATTN_TYPE": "lara", "VIT__APPROX_ATTN_DIM": 3}
    assert_refused(capsys, video_set, trained, "VIT.APPROX_ATTN_TYPE was 'none'", **lara)
    assert run(video_set, trained, **TESTING) == 0
    given = {"TEST__CHECKPOINT_FILE_PATH": str(trained / "checkpoints" / LAST)}
    assert run(video_set, trained.parent / "swapped", **lara, **given) == 0
    log = (trained.parent / "swapped" / "stdout.log").read_text()
    assert "with a different attention" in log
    assert "VIT.APPROX_ATTN_TYPE was 'none', is now 'lara'" in log


def test_buffers_of_a_swapped_attention_are_drawn_from_the_seed(
    trained, video_set, tmp_path, capsys
):
    """Only buffers may be missing from the checkpoint, and each is logged."""
    given = {**TESTING, "TEST__CHECKPOINT_FILE_PATH": str(trained / "checkpoints" / LAST)}
    performer = {**given, "VIT__APPROX_ATTN_TYPE": "performer", "VIT__APPROX_ATTN_DIM": 3}
    assert run(video_set, tmp_path / "swapped", **performer) == 0
    log = (tmp_path / "swapped" / "stdout.log").read_text()
    names = ", ".join(f"blocks.{i}.attn.estimator.projection" for i in range(2))
    assert "seed" in log and names in log
    assert (tmp_path / "swapped" / "test_results.json").exists()
    learned = {**given, "VIT__APPROX_ATTN_TYPE": "lara", "VIT__LARA": {"LEARNED": True}}
    assert run(video_set, tmp_path / "learned", **learned, VIT__APPROX_ATTN_DIM=3) == 2
    assert "blocks.0.attn.estimator.project_q" in capsys.readouterr().err
    assert not (tmp_path / "learned").exists()
    # Other missing weights are an error.
    path = trained / "checkpoints" / LAST
    content = torch.load(path, weights_only=True)
    del content["model_state"]["blocks.0.norm1.bias"]
    checkpoint.save(str(path), content)
    assert run(video_set, tmp_path / "torn", **performer) == 2
    assert "blocks.0.norm1.bias" in capsys.readouterr().err


def test_missing_buffer_is_an_error_unless_the_attention_is_swapped(video_set, tmp_path, capsys):
    performer = {"VIT__APPROX_ATTN_TYPE": "performer", "VIT__APPROX_ATTN_DIM": 3}
    assert run(video_set, tmp_path / "out", **performer) == 0
    path = tmp_path / "out" / "checkpoints" / LAST
    given = {**TESTING, "TEST__CHECKPOINT_FILE_PATH": str(path)}
    assert run(video_set, tmp_path / "exact", **given) == 0
    log = (tmp_path / "exact" / "stdout.log").read_text()
    assert "blocks.0.attn.estimator.projection" in log
    content = torch.load(path, weights_only=True)
    del content["model_state"]["blocks.1.attn.estimator.projection"]
    checkpoint.save(str(path), content)
    assert run(video_set, tmp_path / "again", **given, **performer) == 2
    assert "blocks.1.attn.estimator.projection" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"VIT__NUM_HEADS": 4}, "VIT.NUM_HEADS"),
        ({"DATA__STD": [0.5, 0.5, 0.5]}, "DATA.STD"),
        ({"DATA__SAMPLING_RATE": 3}, "DATA.SAMPLING_RATE"),
        ({"DATA__REVERSE_INPUT_CHANNEL": True}, "DATA.REVERSE_INPUT_CHANNEL"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_testing_another_model_is_refused(trained, video_set, capsys, changes, key, given):
    path = {"TEST__CHECKPOINT_FILE_PATH": str(trained / "checkpoints" / LAST)} if given else {}
    assert_refused(capsys, video_set, trained, key, **TESTING, **changes, **path)


def test_weights_to_test_are_checked_before_training(trained, video_set, tmp_path, capsys):
    changes = {
        "VIT__NUM_HEADS": 4,
        "TEST__ENABLE": True,
        "TEST__CHECKPOINT_FILE_PATH": str(trained / "checkpoints" / LAST),
    }
    assert run(video_set, tmp_path / "new", **changes) == 2
    assert "VIT.NUM_HEADS" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_test_writes_its_own_config_and_environment(trained, video_set):
    names = ("config.yaml", "environment.json")
    before = [(trained / name).read_bytes() for name in names]
    assert run(video_set, trained, **TESTING, DATA__TEST_CROP_SIZE=48) == 0
    assert [(trained / name).read_bytes() for name in names] == before
    assert "TEST_CROP_SIZE: 48" in (trained / "test_config.yaml").read_text()
    assert (trained / "test_environment.json").exists()
    load(trained / "checkpoints" / LAST)  # as `predict` does


def test_report_of_a_run_that_only_tested_has_a_config(trained, video_set, tmp_path):
    from slowfast_lara.runs.folder import read_run

    given = {"TEST__CHECKPOINT_FILE_PATH": str(trained / "checkpoints" / LAST)}
    assert run(video_set, tmp_path / "alone", **TESTING, **given) == 0
    assert not (tmp_path / "alone" / "config.yaml").exists()
    report = read_run(str(tmp_path / "alone"), None)
    assert report.setting("VIT.NUM_HEADS") == 2 and report.environment["command"]


def test_number_of_heads_is_compared_in_fine_tuning_and_prediction(
    trained, video_set, tmp_path, capsys
):
    path = str(trained / "checkpoints" / LAST)
    tuning = {"TRAIN__CHECKPOINT_FILE_PATH": path, "TRAIN__CHECKPOINT_EPOCH_RESET": True}
    changes = {**tuning, "VIT__NUM_HEADS": 4, "SOLVER__WEIGHT_DECAY": 0.25}
    assert run(video_set, tmp_path / "tuned", **changes) == 2
    error = capsys.readouterr().err
    assert "VIT.NUM_HEADS was 2, is now 4" in error and "WEIGHT_DECAY" not in error
    assert not (tmp_path / "tuned").exists()
    changes["VIT__NUM_HEADS"] = 2
    assert run(video_set, tmp_path / "tuned", **changes) == 0
    flags = ["--cfg", str(trained / "config.yaml"), "--checkpoint", path]
    video = (video_set / "test.csv").read_text().split()[0]
    assert predict_main([*flags, video]) == 0
    capsys.readouterr()
    assert predict_main([*flags, video, "VIT.NUM_HEADS", "4"]) == 2
    assert "VIT.NUM_HEADS was 2, is now 4" in capsys.readouterr().err


RESET = "set TRAIN.CHECKPOINT_EPOCH_RESET True"
WRONG_ADVICE = ("TRAIN.ACCEPT_CHANGES", "OUTPUT_DIR", "old values")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"MODEL__NUM_CLASSES": NUM_CLASSES + 1}, "MODEL.NUM_CLASSES was 3, is now 4"),
        ({"SOLVER__MAX_EPOCH": 9}, "SOLVER.MAX_EPOCH was 1, is now 9"),
        ({}, "was trained for 1 epochs, and SOLVER.MAX_EPOCH is 1"),
        ({"TRAIN__ACCEPT_CHANGES": True, "SOLVER__BASE_LR": 0.5}, "was trained for 1 epochs"),
        ({"TRAIN__ACCEPT_CHANGES": True, "SOLVER__MAX_EPOCH": 4, "VIT__DEPTH": 1}, "blocks.1"),
    ],
)
def test_fine_tuning_without_a_reset_is_refused_with_the_remedy(
    trained, video_set, tmp_path, capsys, changes, reason
):
    path = str(trained / "checkpoints" / LAST)
    out, given = tmp_path / "tuned", {"TRAIN__CHECKPOINT_FILE_PATH": path}
    assert run(video_set, out, **given, **changes) == 2
    error = only_error(capsys)
    assert path in error and reason in error and error.endswith(RESET)
    assert not any(words in error for words in WRONG_ADVICE) and not out.exists()
    changes = {**changes, "TRAIN__CHECKPOINT_EPOCH_RESET": True}
    if "VIT__DEPTH" not in changes:
        assert run(video_set, out, **given, **changes) == 0
        assert len(list((out / "checkpoints").iterdir())) > 0


def test_weights_without_a_config_are_not_resumed(trained, video_set, tmp_path, capsys):
    """Otherwise a new training would begin in the middle of its schedule."""
    path = tmp_path / "weights.pyth"
    content = load_checkpoint(trained, LAST)
    content["cfg"] = content["cfg"].replace("MAX_EPOCH: 1\n", "MAX_EPOCH: 3\n")
    for left_out in (["cfg"], ["train_list"], ["cfg", "train_list", "optimizer_state"], ["epoch"]):
        torch.save({key: content[key] for key in content if key not in left_out}, path)
        changes = {"TRAIN__CHECKPOINT_FILE_PATH": str(path), "SOLVER__MAX_EPOCH": 3}
        assert run(video_set, tmp_path / "tuned", **changes) == 2, left_out
        assert only_error(capsys).endswith(RESET)
    torch.save(content, path)
    assert run(video_set, tmp_path / "tuned", **changes) == 0


def test_weights_that_a_resumed_run_ignores_are_logged(trained, video_set, tmp_path):
    path = str(shutil.copy(trained / "checkpoints" / LAST, tmp_path / "other.pyth"))
    tuning = {"TRAIN__CHECKPOINT_FILE_PATH": path, "TRAIN__CHECKPOINT_EPOCH_RESET": True}
    assert run(video_set, trained, **tuning) == 0
    assert f"Ignoring TRAIN.CHECKPOINT_FILE_PATH {path}" in (trained / "stdout.log").read_text()


HOLD = """
import os, sys, time
from slowfast_lara.locks import exclusive_lock
with exclusive_lock(sys.argv[1], "OUTPUT_DIR"):
    if os.fork():
        print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture()
def holder(trained):
    """A process that locks the folder, with a child that outlives it as a DataLoader worker may."""
    process = start(trained, program=("-c", HOLD))
    assert process.stdout.readline() == "held\n"
    yield process
    kill_group(process)


def test_second_run_in_the_same_folder_is_refused(trained, video_set, capsys, holder):
    mentions = ("another run", str(holder.pid), os.uname().nodename)
    assert_refused(capsys, video_set, trained, *mentions)
    assert_refused(capsys, video_set, trained, *mentions, **TESTING)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (trained / LOCK).exists()  # a stale lock file does not block
    assert run(video_set, trained) == 0
    assert not (trained / LOCK).exists()


def test_file_system_without_locks_gives_a_warning(trained, video_set, monkeypatch):
    def lockf(file, flags):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    assert run(video_set, trained) == 0
    assert "lock" in (trained / "stdout.log").read_text()
