"""Losses and gradients that are not finite, and failures of one rank of two."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.commands import run as main
from tests.helpers.fault_injection import inject_fault, keep_weights
from tests.helpers.runs import (
    copy_lists,
    finish,
    free_port,
    json_stats,
    load_checkpoint,
    same_tensors,
    start,
    write_config,
)

WORDS = {"loader": "loader", "forward": "forward pass"}
# Fault, batches per step, iteration. Of eight iterations, the sixth ends a group of two.
CASES = [
    (fault, steps, iteration)
    for fault in ("loss", "infinite loss", "gradient")
    for steps, iteration in ((1, 5), (2, 5), (2, 6), (1, 8))
]


def changes(steps, iteration):
    """One epoch of groups of `steps` batches, with one checkpoint before that of `iteration`."""
    return {
        "TRAIN__BATCH_SIZE": 2,
        "TRAIN__CHECKPOINT_ITERATIONS": (iteration - 1) // steps * steps,
        "SOLVER__ACCUMULATE_STEPS": steps,
        "SOLVER__MAX_EPOCH": 1,
        "SOLVER__CLIP_GRAD": 1.0,
        "TEST__ENABLE": False,
    }


def check(stderr, output, kept, case, *, ranks, bad_rank):
    """Check the message, and that the weights are those of the last good step."""
    fault, steps, iteration = case
    assert len(stderr.splitlines()) == 1, stderr
    # A gradient is checked at the end of its group.
    at = iteration + iteration % 2 if fault == "gradient" and steps == 2 else iteration
    name = fault.split()[-1]
    for part in (
        f"the {name} is not finite at epoch 1, iteration {at} of 8, learning rate ",
        f"{'inf' if fault.startswith('inf') else 'nan'} on rank {bad_rank}, videos ",
    ):
        assert part in stderr
    # A batch has two videos per rank. The summed gradient is NaN on all ranks.
    named = 2 if name == "loss" else 2 * steps * ranks
    assert stderr.count(".mp4") == named
    log = (output / "stdout.log").read_text()
    assert stderr.removeprefix("error: ").strip() in log
    # All earlier iterations are logged, and the weights are those of the last good step.
    assert sum(s.get("_type") == "train_iter" for s in json_stats(output)) == at - 1
    (saved,) = os.listdir(output / "checkpoints")
    assert f"sample_{(iteration - 1) // steps * steps * 2 * ranks:09d}" in saved
    assert same_tensors(kept, load_checkpoint(output, saved)["model_state"])


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("case", CASES)
def test_not_finite_in_one_process(tmp_path, video_set, monkeypatch, capsys, case):
    fault, steps, iteration = case
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **changes(steps, iteration))
    inject_fault(monkeypatch.setattr, fault, iteration)
    keep_weights(monkeypatch.setattr, tmp_path)
    assert main(["--cfg", str(config)]) == 1
    kept = torch.load(tmp_path / "0.pth", weights_only=True)
    check(capsys.readouterr().err, output, kept, case, ranks=1, bad_rank=0)


def run_two(folder, video_set, fault, steps, iteration, bad_rank=1, delay=0):
    """Run two nodes of one process each, with a fault in one, whose report is delayed."""
    lists = copy_lists(folder / "lists", video_set, train=2)  # as many iterations as one process
    config = write_config(folder / "c.yaml", lists, folder / "out", **changes(steps, iteration))
    address = f"tcp://localhost:{free_port()}"
    where = (str(iteration), str(bad_rank), str(folder), str(delay))
    program = ("-m", "tests.helpers.fault_injection", fault, *where, "--")
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
        check(stderr, tmp_path / "out", kept, case, ranks=2, bad_rank=1)


@pytest.mark.parametrize(
    "fault, steps",
    [
        ("loader", 1),
        ("forward", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("loader", 2), ("forward", 1))),
    ],
)
def test_a_failing_rank_ends_the_other(tmp_path, video_set, fault, steps):
    """The other rank must not enter the backward pass: its all-reduce would hang."""
    results = run_two(tmp_path, video_set, fault, steps, 6)
    assert [code for code, _, _ in results] == [1, 1]
    assert "Traceback" in results[1][2]
    assert results[0][2] == f"error: rank 1 failed: ArithmeticError: the {WORDS[fault]} is broken\n"
    assert len(os.listdir(tmp_path / "out" / "checkpoints")) == 1


@pytest.mark.parametrize("delay", [0, pytest.param(4, marks=pytest.mark.slow)])  # seconds
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_ranks_report_the_cause(tmp_path, video_set, bad_rank, delay):
    """Also if the failing rank is slow to report it, or serves the store of the run (rank 0)."""
    results = run_two(tmp_path, video_set, "data", 1, 6, bad_rank, delay)
    assert [code for code, _, _ in results] == ([2, 1] if bad_rank == 0 else [1, 2])
    assert results[bad_rank][2] == "error: the data is broken\n"
    assert results[1 - bad_rank][2] == f"error: rank {bad_rank} failed: the data is broken\n"


@pytest.mark.slow
def test_torchrun_prints_the_error_of_any_rank(tmp_path, video_set):
    """Bad data, which usually all ranks report, is reported by one rank only here."""
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes(1, 6))
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    broken = ("-m", "tests.helpers.fault_injection", "data", "6", "1", str(tmp_path), "0", "--")
    program = (*agent, "--master-port", str(free_port()), *broken)
    code, _, stderr = finish(start("--cfg", config, program=program))
    assert code != 0
    assert stderr.splitlines().count("error: the data is broken") == 1
