"""Runs of several processes: results equal to those of one process, and no process left behind.

Commands on the loopback interface: two "nodes", torchrun, and the spawning launcher.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.launchers import (
    command_line,
    descendants,
    iterations,
    linux_only,
    start_node,
    start_nodes,
    start_spawning,
    start_torchrun,
)
from tests.helpers.runs import (
    finish,
    free_port,
    json_stats,
    kill_group,
    load_checkpoint,
    run_ok,
    same_tensors,
    wait_for,
    write_config,
)

# SGD, because Adam normalises gradients and so amplifies the rounding errors of tiny ones.
SGD = {
    "SOLVER__OPTIMIZING_METHOD": "sgd",
    "SOLVER__BASE_LR": 0.1,
    "SOLVER__CLIP_GRAD": 1.0,
    "TRAIN__CHECKPOINT_ITERATIONS": 1,
}
STEPS = [
    f"checkpoint_epoch_{epoch:05d}{part}.pyth"
    for epoch, part in [
        (0, "_sample_000000004"),
        (0, "_sample_000000008"),
        (0, "_sample_000000012"),
        (1, ""),
        (1, "_sample_000000004"),
        (1, "_sample_000000008"),
        (1, "_sample_000000012"),
        (2, ""),
    ]
]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, video_set):
    """Train and test one process with batches of 4; return the output folder."""
    folder = tmp_path_factory.mktemp("one")
    output = folder / "out"
    config = write_config(
        folder / "c.yaml",
        video_set,
        output,
        TRAIN__BATCH_SIZE=4,
        TEST__SAVE_RESULTS_PATH="scores.npz",
        **SGD,
    )
    run_ok("--cfg", config)
    return output


def assert_same_training(output, one_process):
    """Compare the weights after every step, and the logged metrics."""
    assert set(STEPS) == set(os.listdir(output / "checkpoints"))
    for name in STEPS:
        ours = load_checkpoint(output, name)["model_state"]
        theirs = load_checkpoint(one_process, name)["model_state"]
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-6), (name, key)
    kinds = ("train_epoch", "val_epoch")
    for ours, theirs in zip(
        *([s for s in json_stats(o) if s.get("_type") in kinds] for o in (output, one_process))
    ):
        for key in ("loss", "top1_err", "top5_err", "num_videos"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-5)


def test_two_nodes_equal_one_process(tmp_path, video_set, one_process):
    """Each node has its own working directory: nodes need no shared file system."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    config = write_config(tmp_path / "c.yaml", video_set, "out", TRAIN__BATCH_SIZE=2, **SGD)
    for node in start_nodes(config, 2, folders=folders):
        code, stdout, stderr = finish(node)
        assert code == 0, stdout + stderr
    assert_same_training(folders[0] / "out", one_process)
    assert list(folders[1].iterdir()) == []
    assert json_stats(folders[0] / "out")[-1]["num_videos"] == 7


def test_torchrun_equals_one_process(tmp_path, video_set, one_process):
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, TRAIN__BATCH_SIZE=4, **SGD)
    code, stdout, stderr = finish(start_torchrun(config, 2))
    assert code == 0, stdout + stderr
    assert_same_training(output, one_process)


@pytest.mark.slow
def test_accumulation_in_two_processes(tmp_path, video_set, one_process):
    output = tmp_path / "out"
    changes = {**SGD, "TRAIN__BATCH_SIZE": 2, "SOLVER__ACCUMULATE_STEPS": 2}
    config = write_config(tmp_path / "c.yaml", video_set, output, **changes, TEST__ENABLE=False)
    code, stdout, stderr = finish(start_torchrun(config, 2))
    assert code == 0, stdout + stderr
    ours = load_checkpoint(output, STEPS[-1])["model_state"]
    theirs = load_checkpoint(one_process, STEPS[-1])["model_state"]
    assert all(torch.allclose(ours[key], theirs[key], rtol=0, atol=1e-6) for key in ours)


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_scores_do_not_depend_on_the_world_size(tmp_path, video_set, one_process, processes):
    checkpoint = one_process / "checkpoints" / STEPS[-1]
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        tmp_path / "out",
        TRAIN__ENABLE=False,
        TEST__SAVE_RESULTS_PATH="scores.npz",
        TEST__CHECKPOINT_FILE_PATH=str(checkpoint),
    )
    for node in start_nodes(config, processes):
        code, stdout, stderr = finish(node)
        assert code == 0, stdout + stderr
    results = [
        json.loads((o / "test_results.json").read_text()) for o in (tmp_path / "out", one_process)
    ]
    assert results[0] == results[1]
    assert len({video["path"] for video in results[0]["videos"]}) == 7 == results[0]["num_videos"]
    scores = [np.load(o / "scores.npz")["scores"] for o in (tmp_path / "out", one_process)]
    assert scores[0].shape == (7, 3) and np.array_equal(*scores)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_node_ends_the_other(tmp_path, video_set, victim):
    output = tmp_path / "out"
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        output,
        SOLVER__MAX_EPOCH=100000,
        TRAIN__CHECKPOINT_PERIOD=100000,
    )
    nodes = start_nodes(config, 2)
    wait_for(lambda: iterations(output) > 3)
    os.kill(nodes[victim].pid, signal.SIGKILL)
    code, _, stderr = finish(nodes[1 - victim], seconds=60)
    kill_group(nodes[victim])
    assert code == 1
    assert stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_node_ends_a_long_test(tmp_path, video_set, one_process, victim):
    """A test runs no collectives; the heartbeat detects the loss."""
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "test.csv").write_text((video_set / "test.csv").read_text() * 5000)
    config = write_config(
        tmp_path / "c.yaml",
        lists,
        tmp_path / "out",
        TRAIN__ENABLE=False,
        TEST__CHECKPOINT_FILE_PATH=str(one_process / "checkpoints" / STEPS[-1]),
    )
    nodes = start_nodes(config, 2)
    log = tmp_path / "out" / "stdout.log"
    wait_for(lambda: log.exists() and "test_iter" in log.read_text())
    os.kill(nodes[victim].pid, signal.SIGKILL)
    nodes[victim].communicate()
    code, _, stderr = finish(nodes[1 - victim], seconds=60)
    assert code == 1 and "lost" in stderr


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(tmp_path, video_set):
    changes = {
        "SOLVER__MAX_EPOCH": 40,
        "TEST__ENABLE": False,
        "VIT__DROP_PATH": 0.2,
        "TRAIN__CHECKPOINT_ITERATIONS": 1,
        "TRAIN__CHECKPOINT_KEEP": 2,
    }
    last = "checkpoint_epoch_00040.pyth"
    left_alone = tmp_path / "alone"
    config = write_config(tmp_path / "a.yaml", video_set, left_alone, **changes)
    code, _, stderr = finish(start_torchrun(config, 2))
    assert code == 0, stderr
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **changes)
    agent = start_torchrun(config, 2, flags=("--max-restarts", "1"))
    wait_for(lambda: iterations(output) > 10)
    workers = [pid for pid in descendants(agent.pid) if "run_net" in command_line(pid)]
    os.kill(workers[1], signal.SIGKILL)
    code, _, stderr = finish(agent)
    assert code == 0, stderr
    assert "Resuming from" in (output / "stdout.log").read_text()
    assert same_tensors(
        load_checkpoint(output, last)["model_state"],
        load_checkpoint(left_alone, last)["model_state"],
    )


def test_signal_to_one_node_stops_both(tmp_path, video_set):
    output = tmp_path / "out"
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        output,
        SOLVER__MAX_EPOCH=100000,
        TRAIN__CHECKPOINT_PERIOD=100000,
        DATA_LOADER__NUM_WORKERS=1,
    )
    nodes = start_nodes(config, 2)
    wait_for(lambda: iterations(output) > 3)
    os.kill(nodes[1].pid, signal.SIGUSR1)
    codes = [finish(node)[0] for node in nodes]
    assert codes == [75, 75]
    assert len(os.listdir(output / "checkpoints")) == 1


def test_a_port_in_use_is_named(tmp_path, video_set):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out")
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, stderr = finish(start_node(config, 0, port), seconds=60)
    assert code == 1
    assert str(port) in stderr.splitlines()[-1] and "Traceback" not in stderr


@pytest.mark.parametrize(
    "shard, restarts",
    [(0, 0), *(pytest.param(*it, marks=pytest.mark.slow) for it in [(1, 0), (0, 1), (1, 1)])],
)
def test_a_missing_node_ends_the_rendezvous(tmp_path, video_set, shard, restarts):
    changes = {"DIST_TIMEOUT": 2, "TRAIN__MAX_RESTARTS": restarts}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    node = start_node(config, shard, free_port())
    code, _, stderr = finish(node, seconds=60)
    assert code == 1 and len(stderr.splitlines()) == 1
    assert "rendezvous" in stderr or "node 0 does not answer" in stderr


def assert_gone(pids):
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=30)


@pytest.mark.slow
def test_spawn_equals_one_process(tmp_path, video_set, one_process):
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, TRAIN__BATCH_SIZE=4, **SGD)
    code, stdout, stderr = finish(start_spawning(tmp_path, config))
    assert code == 0, stdout + stderr
    assert_same_training(output, one_process)


@linux_only
@pytest.mark.parametrize(
    "victim",
    [
        "child",
        pytest.param("parent", marks=pytest.mark.slow),
        pytest.param("none", marks=pytest.mark.slow),
    ],
)
def test_spawn_leaves_no_process_behind(tmp_path, video_set, victim):
    output = tmp_path / "out"
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        output,
        SOLVER__MAX_EPOCH=100000,
        TRAIN__CHECKPOINT_PERIOD=100000,
        DATA_LOADER__NUM_WORKERS=1,
    )
    parent = start_spawning(tmp_path, config)
    try:
        wait_for(lambda: iterations(output) > 3 or parent.poll() is not None)
        pids = descendants(parent.pid)
        ranks = [pid for pid in pids if "spawn_main" in command_line(pid)]
        assert len(ranks) >= 2
        if victim == "none":
            os.kill(parent.pid, signal.SIGTERM)
        else:
            os.kill(ranks[1] if victim == "child" else parent.pid, signal.SIGKILL)
        parent.wait(timeout=60)
        assert parent.returncode == {"child": 1, "parent": -9, "none": 75}[victim]
        assert_gone(pids)
        saved = output / "checkpoints"
        assert saved.exists() == (victim == "none")
    finally:
        kill_group(parent)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_an_indivisible_batch_is_reported_once(tmp_path, video_set, launcher):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", TRAIN__BATCH_SIZE=3)
    spawning = launcher == "spawn"
    node = start_spawning(tmp_path, config) if spawning else start_torchrun(config, 2)
    code, _, stderr = finish(node)
    assert code != 0 and stderr.count("TRAIN.BATCH_SIZE is 3") == 1
