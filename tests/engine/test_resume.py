"""Interrupted and resumed runs equal uninterrupted ones, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from slowfast_lara.runs import checkpoint
from tests.helpers.commands import run as main
from tests.helpers.launchers import iterations
from tests.helpers.runs import (
    copy_lists,
    finish,
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
# Everything random in training (workers, drop path, LARA noise, augmentation, mixup), and EMA.
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
def uninterrupted(tmp_path_factory, video_set):
    folder = tmp_path_factory.mktemp("run")
    config, output = noisy_config(folder, video_set, "run", TRAIN__CHECKPOINT_ITERATIONS=0)
    run_ok("--cfg", config)
    return load_checkpoint(output, LAST)


def assert_same_end(output, uninterrupted):
    resumed = load_checkpoint(output, LAST)
    for name in ("model_state", "ema_state"):
        assert same_tensors(resumed[name], uninterrupted[name])
    assert resumed["ema_steps"] == uninterrupted["ema_steps"] == 48
    states = resumed["optimizer_state"]["state"], uninterrupted["optimizer_state"]["state"]
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        assert same_tensors(states[0][key], states[1][key])


def run_and_signal(config, output, number, after_iterations):
    """Send a signal after a number of iterations; return exit code and stderr."""
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
def test_killed_ten_times(tmp_path, video_set, uninterrupted):
    config, output = noisy_config(tmp_path, video_set, "killed")
    rng = random.Random(0)
    for _ in range(10):
        before = iterations(output)
        process = start("--cfg", config)
        # At any time after the first batch: in a step, while writing, between epochs.
        wait_for(lambda before=before: iterations(output) > before)
        time.sleep(rng.uniform(0, 0.15))
        assert process.poll() is None, "the run ended before it was killed"
        os.kill(process.pid, signal.SIGKILL)
        kill_group(process)
    assert not (output / "checkpoints" / LAST).exists()
    run_ok("--cfg", config)
    assert_same_end(output, uninterrupted)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_signal_saves_and_resumes(tmp_path, video_set, uninterrupted, number):
    config, output = noisy_config(tmp_path, video_set, "stopped", TRAIN__CHECKPOINT_ITERATIONS=0)
    code, stderr = run_and_signal(config, output, number, after_iterations=3)
    assert code == 75
    assert len(stderr.splitlines()) == 1 and signal.Signals(number).name in stderr
    saved = os.listdir(output / "checkpoints")
    assert len(saved) == 1 and saved[0] in stderr
    run_ok("--cfg", config)
    assert_same_end(output, uninterrupted)


def test_ctrl_c_for_the_whole_process_group(tmp_path, video_set, uninterrupted):
    """A terminal signals the DataLoader workers too; they must survive it."""
    config, output = noisy_config(tmp_path, video_set, "group", TRAIN__CHECKPOINT_ITERATIONS=0)
    process = start("--cfg", config)
    wait_for(lambda: iterations(output) >= 2)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code == 75, stderr
    run_ok("--cfg", config)
    assert_same_end(output, uninterrupted)


@pytest.mark.slow
def test_a_truncated_newest_checkpoint_is_skipped(tmp_path, video_set, uninterrupted):
    config, output = noisy_config(tmp_path, video_set, "torn", SOLVER__MAX_EPOCH=6)
    run_and_signal(config, output, signal.SIGTERM, after_iterations=6)
    newest = sorted(os.listdir(output / "checkpoints"))[-1]
    torn = output / "checkpoints" / newest
    os.truncate(torn, torn.stat().st_size // 2)
    run_ok("--cfg", config)
    assert f"{newest}" in "".join(
        line for line in (output / "stdout.log").read_text().splitlines() if "unreadable" in line
    )
    assert_same_end(output, uninterrupted)


@pytest.mark.usefixtures("in_process")
def test_checkpoints_are_written_between_accumulated_steps(tmp_path, video_set):
    """An epoch of eight batches, three per step."""
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
def test_a_complete_run_is_not_trained_again(tmp_path, video_set):
    config, output = noisy_config(tmp_path, video_set, "done", SOLVER__MAX_EPOCH=1)
    assert main(["--cfg", str(config)]) == 0
    done = iterations(output)
    assert "Training is complete" not in (output / "stdout.log").read_text()
    assert main(["--cfg", str(config)]) == 0
    assert iterations(output) == done == 8
    path = output / "checkpoints" / "checkpoint_epoch_00001.pyth"
    assert (output / "stdout.log").read_text().count(f"Training is complete: {path}") == 1


@pytest.mark.usefixtures("in_process")
def test_temporary_files_of_a_killed_run_are_removed(tmp_path, video_set):
    config, output = noisy_config(tmp_path, video_set, "left", SOLVER__MAX_EPOCH=1)
    (output / "checkpoints").mkdir(parents=True)
    left = [folder / ".writing-1" for folder in (output / "checkpoints", output)]
    for path in left:
        path.write_bytes(b"")
    assert main(["--cfg", str(config)]) == 0
    assert not any(path.exists() for path in left)


def test_stopped_in_validation_keeps_the_epoch(tmp_path, video_set):
    """A signal during a long validation saves the trained epoch."""
    lists = copy_lists(tmp_path / "lists", video_set, val=2000)
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
    """The epoch is one optimiser step, so that the run cannot save soon after the first signal."""
    lists = copy_lists(tmp_path / "lists", video_set, train=1000)
    config, output = noisy_config(tmp_path, lists, "twice", SOLVER__ACCUMULATE_STEPS=8000)
    process = start("--cfg", config)
    wait_for(lambda: iterations(output) >= 1)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 130 and "interrupted" in stderr
    assert not (output / "checkpoints").exists()


def test_run_net_help_is_short():
    code, stdout, _ = run_net("--help")
    assert code == 0 and "--num_shards" in stdout


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("old_name", [False, True])
def test_resuming_with_larger_batches(tmp_path, video_set, monkeypatch, old_name):
    """Stop after 7 batches of 1, resume with batches of 4."""
    # Mixup needs two clips per batch.
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

    def prune_and_list(written, keep):
        prune(written, keep)
        left.append(os.listdir(folder))
        assert checkpoint.newest(str(output))[0] == written

    monkeypatch.setattr(checkpoint, "prune", prune_and_list)
    four = {"TRAIN__BATCH_SIZE": 4, "TRAIN__CHECKPOINT_KEEP": 1}
    config, _ = noisy_config(tmp_path, video_set, "batches", **changes, **four)
    assert main(["--cfg", str(config)]) == 0
    names = ["_sample_000000008", "_sample_000000012"]
    first, second = (f"checkpoint_epoch_00000{name}.pyth" for name in names)
    assert left == [[first], [second], ["checkpoint_epoch_00001.pyth"]]
