"""Interrupted and resumed is the same as uninterrupted, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from slowfast_lara.runs import checkpoint
from tests.helpers.commands import run as main
from tests.helpers.runs import (
    finish,
    json_stats,
    kill_group,
    load_checkpoint,
    run_net,
    run_ok,
    same_tensors,
    start,
    wait_for,
    write_config,
)

LAST = "checkpoint_epoch_00006.pyth"
# All that draws at random in training: workers, dropped paths, LARA's noise, changes of clips,
# mixed batches; and what has a state of its own: the average of the weights.
NOISY = {
    "DATA_LOADER__NUM_WORKERS": 2,
    "VIT__DROP_PATH": 0.3,
    "VIT__DROP": 0.1,
    "VIT__APPROX_ATTN_TYPE": "lara",
    "VIT__APPROX_ATTN_DIM": 3,
    "DATA__USE_REPEATED_AUG": True,
    "DATA__GRAYSCALE": True,
    "DATA__GAUSSIAN": True,
    "DATA__RE_PROB": 0.5,
    "MIXUP__ENABLE": True,
    "SOLVER__LAYER_DECAY": 0.8,
    "SOLVER__EMA_DECAY": 0.95,
    "SOLVER__MAX_EPOCH": 6,
    "SOLVER__SMOOTHING": 0.2,
    "SOLVER__CLIP_GRAD": 1.0,
    "TRAIN__CHECKPOINT_ITERATIONS": 1,
    "TRAIN__CHECKPOINT_KEEP": 3,
    "TRAIN__BATCH_SIZE": 2,
    "TEST__ENABLE": False,
}


def noisy_config(folder, video_set, name, **changes):
    output = folder / name
    return write_config(folder / f"{name}.yaml", video_set, output, **{**NOISY, **changes}), output


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory, video_set):
    config, output = noisy_config(tmp_path_factory.mktemp("alone"), video_set, "alone")
    run_ok("--cfg", config)
    return load_checkpoint(output, LAST)


def assert_same_end(output, left_alone):
    resumed = load_checkpoint(output, LAST)
    for name in ("model_state", "ema_state"):
        assert same_tensors(resumed[name], left_alone[name])
    assert resumed["ema_steps"] == left_alone["ema_steps"] == 48
    states = resumed["optimizer_state"]["state"], left_alone["optimizer_state"]["state"]
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        assert same_tensors(states[0][key], states[1][key])


def iterations(output) -> int:
    if not (output / "stdout.log").exists():
        return 0
    return sum(stats.get("_type") == "train_iter" for stats in json_stats(output))


def run_and_signal(config, output, number, after_iterations):
    """Send a signal once so many more batches are done; exit code and stderr."""
    before = iterations(output)
    process = start("--cfg", config)
    try:
        wait_for(
            lambda: iterations(output) >= before + after_iterations or process.poll() is not None
        )
        os.kill(process.pid, number)
        code, _, stderr = finish(process)
        return code, stderr
    finally:
        kill_group(process)


@pytest.mark.slow
def test_killed_at_ten_moments(tmp_path, video_set, left_alone):
    config, output = noisy_config(tmp_path, video_set, "killed")
    rng = random.Random(0)
    for _ in range(10):
        before = iterations(output)
        process = start("--cfg", config)
        # Anywhere from the first batch on: in a step, in a write, between epochs.
        wait_for(lambda before=before: iterations(output) > before)
        time.sleep(rng.uniform(0, 0.15))
        assert process.poll() is None, "the run was over before it was killed"
        os.kill(process.pid, signal.SIGKILL)
        kill_group(process)
    assert not (output / "checkpoints" / LAST).exists()
    run_ok("--cfg", config)
    assert_same_end(output, left_alone)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_signal_saves_and_resumes(tmp_path, video_set, left_alone, number):
    config, output = noisy_config(tmp_path, video_set, "stopped", TRAIN__CHECKPOINT_ITERATIONS=0)
    code, stderr = run_and_signal(config, output, number, after_iterations=3)
    assert code == 75
    assert len(stderr.splitlines()) == 1 and signal.Signals(number).name in stderr
    saved = os.listdir(output / "checkpoints")
    assert len(saved) == 1 and saved[0] in stderr
    run_ok("--cfg", config)
    assert_same_end(output, left_alone)


def test_ctrl_c_reaches_the_whole_group(tmp_path, video_set, left_alone):
    """A terminal signals the loader's workers too; they must outlive it."""
    config, output = noisy_config(tmp_path, video_set, "group", TRAIN__CHECKPOINT_ITERATIONS=0)
    process = start("--cfg", config)
    wait_for(lambda: iterations(output) >= 2)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code == 75, stderr
    run_ok("--cfg", config)
    assert_same_end(output, left_alone)


@pytest.mark.slow
def test_torn_newest_checkpoint_is_passed_over(tmp_path, video_set, left_alone):
    config, output = noisy_config(tmp_path, video_set, "torn", SOLVER__MAX_EPOCH=6)
    run_and_signal(config, output, signal.SIGTERM, after_iterations=6)
    newest = sorted(os.listdir(output / "checkpoints"))[-1]
    torn = output / "checkpoints" / newest
    os.truncate(torn, torn.stat().st_size // 2)
    run_ok("--cfg", config)
    assert f"{newest}" in "".join(
        line for line in (output / "stdout.log").read_text().splitlines() if "passing over" in line
    )
    assert_same_end(output, left_alone)


@pytest.mark.usefixtures("in_process")
def test_accumulated_steps_resume_whole(tmp_path, video_set):
    """A step of three batches of eight: saved between steps only."""
    changes = {
        "SOLVER__ACCUMULATE_STEPS": 3,
        "DATA_LOADER__NUM_WORKERS": 0,
        "SOLVER__MAX_EPOCH": 2,
        "TRAIN__CHECKPOINT_KEEP": 0,
    }
    config, output = noisy_config(tmp_path, video_set, "accumulated", **changes)
    assert main(["--cfg", str(config)]) == 0
    names = sorted(os.listdir(output / "checkpoints"))
    assert names == [
        "checkpoint_epoch_00000_sample_000000006.pyth",
        "checkpoint_epoch_00000_sample_000000012.pyth",
        "checkpoint_epoch_00001.pyth",
        "checkpoint_epoch_00001_sample_000000006.pyth",
        "checkpoint_epoch_00001_sample_000000012.pyth",
        "checkpoint_epoch_00002.pyth",
    ]
    end = load_checkpoint(output, names[-1])["model_state"]
    for name in names[2:]:
        (output / "checkpoints" / name).unlink()
    assert main(["--cfg", str(config)]) == 0
    assert same_tensors(load_checkpoint(output, names[-1])["model_state"], end)


@pytest.mark.usefixtures("in_process")
def test_finished_run_is_not_trained_again(tmp_path, video_set):
    config, output = noisy_config(tmp_path, video_set, "done", SOLVER__MAX_EPOCH=1)
    assert main(["--cfg", str(config)]) == 0
    done = iterations(output)
    assert "Training is finished" not in (output / "stdout.log").read_text()
    assert main(["--cfg", str(config)]) == 0
    assert iterations(output) == done == 8
    path = output / "checkpoints" / "checkpoint_epoch_00001.pyth"
    told = f"Training is finished: 1 epochs are done (SOLVER.MAX_EPOCH 1) in {path}"
    assert (output / "stdout.log").read_text().count(told) == 1


@pytest.mark.usefixtures("in_process")
def test_unfinished_writes_do_not_stay(tmp_path, video_set):
    config, output = noisy_config(tmp_path, video_set, "left", SOLVER__MAX_EPOCH=1)
    (output / "checkpoints").mkdir(parents=True)
    left = [folder / ".writing-1" for folder in (output / "checkpoints", output)]
    for path in left:
        path.write_bytes(b"")
    assert main(["--cfg", str(config)]) == 0
    assert not any(path.exists() for path in left)


def test_stopped_in_validation_keeps_the_epoch(tmp_path, video_set):
    """A long validation, stopped: the epoch that was trained is saved."""
    lists = tmp_path / "lists"
    lists.mkdir()
    for split in ("train", "test"):
        (lists / f"{split}.csv").write_text((video_set / f"{split}.csv").read_text())
    (lists / "val.csv").write_text((video_set / "val.csv").read_text() * 2000)
    config, output = noisy_config(
        tmp_path,
        lists,
        "val",
        TRAIN__CHECKPOINT_ITERATIONS=0,
        TRAIN__CHECKPOINT_PERIOD=5,
        TRAIN__EVAL_PERIOD=1,
    )
    process = start("--cfg", config)
    wait_for(lambda: iterations(output) >= 8)
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code == 75 and "checkpoint_epoch_00001.pyth" in stderr
    assert torch.is_tensor(
        load_checkpoint(output, "checkpoint_epoch_00001.pyth")["model_state"]["head.weight"]
    )


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once(tmp_path, video_set):
    """In an epoch that is one long step, so that the first one must wait."""
    lists = tmp_path / "lists"
    lists.mkdir()
    for split, times in (("train", 1000), ("val", 1), ("test", 1)):
        (lists / f"{split}.csv").write_text((video_set / f"{split}.csv").read_text() * times)
    config, output = noisy_config(tmp_path, lists, "twice", SOLVER__ACCUMULATE_STEPS=8000)
    process = start("--cfg", config)
    wait_for(lambda: iterations(output) >= 1)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 130 and "interrupted" in stderr.splitlines()[0]
    assert not (output / "checkpoints").exists()


def test_run_net_help_is_short():
    code, stdout, _ = run_net("--help")
    assert code == 0 and "--num_shards" in stdout


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("old_name", [False, True])
def test_larger_batches_go_on_and_are_kept(tmp_path, video_set, monkeypatch, old_name):
    """Stopped after 7 batches of 1, continued with batches of 4."""
    # A batch of one clip has none to mix it with.
    changes = {"SOLVER__MAX_EPOCH": 1, "DATA_LOADER__NUM_WORKERS": 0, "MIXUP__ENABLE": False}
    one = {"TRAIN__BATCH_SIZE": 1, "TRAIN__CHECKPOINT_KEEP": 0}
    config, output = noisy_config(tmp_path, video_set, "batches", **changes, **one)
    assert main(["--cfg", str(config)]) == 0
    folder = output / "checkpoints"
    stopped_at = folder / "checkpoint_epoch_00000_sample_000000007.pyth"
    for path in folder.iterdir():
        if path != stopped_at:
            path.unlink()
    if old_name:
        stopped_at.rename(folder / "checkpoint_epoch_00000_iter_000007.pyth")
    left, prune = [], checkpoint.prune

    def prune_and_look(written, keep):
        prune(written, keep)
        left.append(os.listdir(folder))
        assert checkpoint.newest(str(output))[0] == written

    monkeypatch.setattr(checkpoint, "prune", prune_and_look)
    four = {"TRAIN__BATCH_SIZE": 4, "TRAIN__CHECKPOINT_KEEP": 1}
    config, _ = noisy_config(tmp_path, video_set, "batches", **changes, **four)
    assert main(["--cfg", str(config)]) == 0
    names = ["_sample_000000008", "_sample_000000012"]
    first, second = (f"checkpoint_epoch_00000{name}.pyth" for name in names)
    assert left == [[first], [second], ["checkpoint_epoch_00001.pyth"]]
