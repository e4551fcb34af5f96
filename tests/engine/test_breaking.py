"""What is not finite is never stepped on, and who fails leaves nobody waiting."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.commands import run as main
from tests.helpers.fault_injection import break_training, keep_weights
from tests.helpers.runs import (
    finish,
    free_port,
    json_stats,
    load_checkpoint,
    same_tensors,
    start,
    write_config,
)

# What breaks, batches of a step, the iteration. Of eight, the sixth ends a group of two.
CASES = [
    (what, steps, iteration)
    for what in ("loss", "infinite loss", "gradient")
    for steps, iteration in ((1, 5), (2, 5), (2, 6), (1, 8))
]


def changes(steps, iteration):
    """An epoch of groups of `steps` batches, saved once: before the group of `iteration`."""
    return {
        "TRAIN__BATCH_SIZE": 2,
        "TRAIN__CHECKPOINT_ITERATIONS": (iteration - 1) // steps * steps,
        "SOLVER__ACCUMULATE_STEPS": steps,
        "SOLVER__MAX_EPOCH": 1,
        "SOLVER__CLIP_GRAD": 1.0,
        "TEST__ENABLE": False,
    }


def check(stderr, output, kept, case, *, processes, bad_process):
    """The message, and weights as the last good step left them."""
    what, steps, iteration = case
    assert len(stderr.splitlines()) == 1, stderr
    # A gradient is looked at when its group ends.
    at = iteration + iteration % 2 if what == "gradient" and steps == 2 else iteration
    name = what.split()[-1]
    for part in (
        f"error: the {name} is not finite at epoch 1, iteration {at} of 8, learning rate ",
        f"{'inf' if what.startswith('inf') else 'nan'} in process {bad_process}, batch of ",
        "The last checkpoint is as it was.",
    ):
        assert part in stderr
    # Each process has two videos in a batch. The gradient is NaN in all after its sum.
    named = 2 if name == "loss" else 2 * steps * processes
    assert stderr.count(".mp4") == named
    log = (output / "stdout.log").read_text()
    assert stderr.removeprefix("error: ").strip() in log
    # Lines of all iterations before it, and weights as the last step before it left them.
    assert sum(s.get("_type") == "train_iter" for s in json_stats(output)) == at - 1
    (saved,) = os.listdir(output / "checkpoints")
    assert f"sample_{(iteration - 1) // steps * steps * 2 * processes:09d}" in saved
    assert same_tensors(kept, load_checkpoint(output, saved)["model_state"])


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("case", CASES)
def test_not_finite_in_one_process(tmp_path, video_set, monkeypatch, capsys, case):
    what, steps, iteration = case
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **changes(steps, iteration))
    break_training(monkeypatch.setattr, what, iteration)
    keep_weights(monkeypatch.setattr, tmp_path)
    assert main(["--cfg", str(config)]) == 1
    kept = torch.load(tmp_path / "0.pth", weights_only=True)
    check(capsys.readouterr().err, output, kept, case, processes=1, bad_process=0)


def run_two(folder, video_set, what, steps, iteration):
    """Two nodes of one process each; the second one breaks."""
    lists = folder / "lists"
    lists.mkdir()
    for split in ("train", "val", "test"):  # as many iterations as one process has
        text = (video_set / f"{split}.csv").read_text()
        (lists / f"{split}.csv").write_text(text * (2 if split == "train" else 1))
    config = write_config(folder / "c.yaml", lists, folder / "out", **changes(steps, iteration))
    address = f"tcp://localhost:{free_port()}"
    program = ("-m", "tests.helpers.fault_injection", what, str(iteration), "1", str(folder), "--")
    common = ("--cfg", config, "--num_shards", 2, "--init_method", address)
    nodes = [start(*common, "--shard_id", i, program=program) for i in range(2)]
    return [finish(node) for node in nodes]


@pytest.mark.parametrize(
    "case",
    [
        case
        if case in (("loss", 1, 5), ("infinite loss", 2, 5), ("gradient", 2, 6))
        else pytest.param(case, marks=pytest.mark.slow)
        for case in CASES
    ],
)
def test_not_finite_in_one_of_two_processes(tmp_path, video_set, case):
    results = run_two(tmp_path, video_set, *case)
    assert [code for code, _, _ in results] == [1, 1]
    for i, (_, _, stderr) in enumerate(results):
        kept = torch.load(tmp_path / f"{i}.pth", weights_only=True)
        check(stderr, tmp_path / "out", kept, case, processes=2, bad_process=1)


@pytest.mark.parametrize(
    "what, steps",
    [
        ("loader", 1),
        ("forward", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("loader", 2), ("forward", 1))),
    ],
)
def test_process_that_fails_leaves_nobody_waiting(tmp_path, video_set, what, steps):
    """The other one may not go into a backward pass: its gradients would wait for a sum."""
    results = run_two(tmp_path, video_set, what, steps, 6)
    assert [code for code, _, _ in results] == [1, 1]
    assert "ArithmeticError" in results[1][2]
    assert "lost another process" in results[0][2] and "Traceback" not in results[0][2]
    assert len(os.listdir(tmp_path / "out" / "checkpoints")) == 1


@pytest.mark.slow
def test_torchrun_prints_the_reason_of_any_process(tmp_path, video_set):
    """Also of bad data, which all processes would see in most cases."""
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes(1, 6))
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    broken = ("-m", "tests.helpers.fault_injection", "data", "6", "1", str(tmp_path), "--")
    program = (*agent, "--master-port", str(free_port()), *broken)
    code, _, stderr = finish(start("--cfg", config, program=program))
    assert code != 0
    assert stderr.splitlines().count("error: the data is broken") == 1
