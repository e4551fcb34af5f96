"""Checkpoints that are written in the background, as on GPUs; here, the training is on the CPU."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from slowfast_lara.engine import checkpoint_writer, train_state
from slowfast_lara.engine.checkpoint_writer import CheckpointWriter, copied_to_cpu
from slowfast_lara.runs import checkpoint
from tests.helpers.commands import run as main
from tests.helpers.launchers import iterations
from tests.helpers.runs import (
    RUN_NET,
    copy_lists,
    finish,
    kill_group,
    load_checkpoint,
    run_ok,
    same_tensors,
    start,
    wait_for,
    write_config,
)

# Writes in the background, and takes SECONDS longer for each checkpoint. If SECONDS is negative,
# the first write ends only after the training has logged the next iteration.
SLOW_WRITES = """
import pathlib, runpy, sys, time
from slowfast_lara.engine import train_state
from slowfast_lara.runs import checkpoint

seconds = float(sys.argv.pop(1))
writer, save = train_state.CheckpointWriter, checkpoint.torch.save
train_state.CheckpointWriter = lambda background: writer(background=True)

def slow_save(content, path):
    with open(path, "wb") as file:
        file.write(b"half")
        file.flush()
        time.sleep(max(seconds, 0))
    log, deadline = pathlib.Path(path).parents[1] / "stdout.log", time.monotonic() + 60
    while seconds < 0 and time.monotonic() < deadline and '"iter": "4/8"' not in log.read_text():
        time.sleep(0.01)
    save(content, path)

checkpoint.torch.save = slow_save
runpy.run_path({run_net!r}, run_name="__main__")
"""
BACKGROUND = ("-c", SLOW_WRITES.format(run_net=RUN_NET))
LAST = "checkpoint_epoch_00003.pyth"
CHANGES = {
    "SOLVER__MAX_EPOCH": 3,
    "SOLVER__EMA_DECAY": 0.9,
    "VIT__DROP_PATH": 0.3,
    "TRAIN__BATCH_SIZE": 2,
    "TRAIN__CHECKPOINT_ITERATIONS": 3,
    "TRAIN__CHECKPOINT_KEEP": 2,
    "TRAIN__CHECKPOINT_BEST": True,
    "TEST__ENABLE": False,
}


def test_copies_share_memory_as_the_originals_do():
    x, other = torch.randn(3, 4), torch.randn(2)
    content = {"a": x, "b": [x.detach(), {"c": other}], "d": "text", "e": (1, x[1:])}
    copy = copied_to_cpu(content, {})
    x.zero_()
    assert copy["a"].any() and copy["a"] is copy["b"][0] and copy["e"][1].any()
    assert torch.equal(copy["b"][1]["c"], other) and copy["b"][1]["c"] is not other
    assert copy["d"] == "text" and type(copy["e"]) is tuple


def test_one_write_at_a_time_and_errors_in_the_caller():
    writer, release, done = CheckpointWriter(background=True), threading.Event(), []

    def write(content):
        release.wait(10)
        done.append(content["n"])
        if content["n"] == 2:
            raise OSError("disk full")

    writer.submit({"n": 1}, write)
    writer.check()  # it runs
    assert done == []
    release.set()
    writer.submit({"n": 2}, write)
    assert done[0] == 1
    with pytest.raises(OSError, match="disk full"):
        while True:  # until the write has failed
            writer.check()
    writer.wait()  # an error is raised once
    with pytest.raises(OSError, match="disk full"):
        CheckpointWriter(background=False).submit({"n": 2}, write)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, video_set):
    """The run with checkpoints that are written before the training continues."""
    folder = tmp_path_factory.mktemp("reference")
    run_ok("--cfg", write_config(folder / "c.yaml", video_set, folder / "out", **CHANGES))
    return folder / "out"


def assert_equal_checkpoints(output, reference):
    names = sorted(os.listdir(output / "checkpoints"))
    assert names == sorted(os.listdir(reference / "checkpoints")) and LAST in names
    for name in names:
        ours, theirs = load_checkpoint(output, name), load_checkpoint(reference, name)
        for key in ("model_state", "ema_state"):
            assert same_tensors(ours[key], theirs[key])
        for key, state in theirs["optimizer_state"]["state"].items():
            assert same_tensors(ours["optimizer_state"]["state"][key], state)


@pytest.mark.parametrize("seconds", [0, -1])
def test_the_checkpoints_are_those_of_the_step(tmp_path, video_set, reference, seconds):
    """Although the training changes the weights during the write."""
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **CHANGES)
    code, _, stderr = finish(start(seconds, "--cfg", config, program=BACKGROUND))
    assert code == 0, stderr
    assert_equal_checkpoints(output, reference)
    if seconds:  # the training continued: the log of a save comes after later iterations
        log = (output / "stdout.log").read_text()
        first = log.index("sample_000000006.pyth")
        assert log.index('"iter": "4/8"') < first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_during_a_write_resumes(tmp_path, video_set, reference, number):
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **CHANGES)
    process = start(0.5, "--cfg", config, program=BACKGROUND)
    folder = output / "checkpoints"
    wait_for(lambda: folder.exists() and len(os.listdir(folder)) >= 2)  # one whole, one unfinished
    os.kill(process.pid, number)
    if number == signal.SIGTERM:
        code, _, stderr = finish(process)
        assert code == 75, stderr
        newest, _ = checkpoint.newest(str(output))
        assert newest in stderr and not [x for x in os.listdir(folder) if x.startswith(".")]
    else:
        kill_group(process)
        assert checkpoint.newest(str(output)) is not None
    code, _, stderr = finish(start(0, "--cfg", config, program=BACKGROUND))
    assert code == 0, stderr
    assert_equal_checkpoints(output, reference)


@pytest.mark.usefixtures("in_process")
def test_the_last_write_must_not_fail(tmp_path, video_set, monkeypatch, capsys):
    monkeypatch.setattr(train_state, "CheckpointWriter", lambda background: CheckpointWriter(True))

    def full_disk(content, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    changes = {"SOLVER__MAX_EPOCH": 1, "TEST__ENABLE": False}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    assert main(["--cfg", str(config)]) == 1
    assert "cannot write checkpoint" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_a_failed_write_ends_the_run(tmp_path, video_set, monkeypatch, capsys):
    monkeypatch.setattr(train_state, "CheckpointWriter", lambda background: CheckpointWriter(True))
    save = checkpoint.torch.save

    def full_disk(content, path):
        if content["iteration"] == 40:
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    lists = copy_lists(tmp_path / "lists", video_set, train=10)
    changes = {**CHANGES, "TRAIN__CHECKPOINT_ITERATIONS": 20}
    config = write_config(tmp_path / "c.yaml", lists, tmp_path / "out", **changes)
    assert main(["--cfg", str(config)]) == 1
    message = capsys.readouterr().err
    assert "cannot write checkpoint" in message and "No space left" in message
    assert os.listdir(tmp_path / "out" / "checkpoints") == [
        "checkpoint_epoch_00000_sample_000000040.pyth"
    ]
    assert 40 <= iterations(tmp_path / "out") < 60  # not only at the next checkpoint


@pytest.mark.usefixtures("in_process")
def test_an_error_of_the_training_waits_for_the_write(tmp_path, video_set, monkeypatch, capsys):
    """The last checkpoint before the error is complete, as if it had been written at once."""
    from tests.helpers.fault_injection import inject_fault

    monkeypatch.setattr(train_state, "CheckpointWriter", lambda background: CheckpointWriter(True))
    save = checkpoint.torch.save
    monkeypatch.setattr(
        checkpoint.torch, "save", lambda content, path: time.sleep(1) or save(content, path)
    )
    inject_fault(monkeypatch.setattr, "loss", 4)
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **CHANGES)
    assert main(["--cfg", str(config)]) == 1
    assert "the loss is not finite" in capsys.readouterr().err
    assert checkpoint.newest(str(tmp_path / "out"))[1]["iteration"] == 3


def test_a_cpu_waits_for_its_checkpoints(tmp_path, video_set):
    """After a kill, at most TRAIN.CHECKPOINT_ITERATIONS iterations are lost."""
    assert "CPU" in checkpoint_writer.__doc__
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **CHANGES)
    program = ("-c", SLOW_WRITES.format(run_net=RUN_NET).replace("=True", "=background"))
    code, _, stderr = finish(start(0.1, "--cfg", config, program=program))
    assert code == 0, stderr
    log = (output / "stdout.log").read_text()
    assert log.index("sample_000000006.pyth") < log.index('"iter": "4/8"')
