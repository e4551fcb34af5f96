"""Runs end: after a failure, after signals, with workers that do not answer."""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest

from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import _run_alone
from slowfast_lara.engine.signals import SAME_REQUEST_SECONDS, SIGNALS
from slowfast_lara.errors import LAUNCH_DIR, InputError, run_with_exit_code
from slowfast_lara.inference.predict import Predictor
from slowfast_lara.models import build_model
from slowfast_lara.runs.checkpoint import save
from tests.engine.test_distributed import (
    children,
    iterations,
    linux_only,
    start_nodes,
    start_spawning,
    start_torchrun,
)
from tests.helpers.commands import predict as predict_main
from tests.helpers.preloaded import environment
from tests.helpers.runs import (
    RUN_NET,
    finish,
    load_checkpoint,
    run_ok,
    same_tensors,
    start,
    wait_for,
    write_config,
)

ENDLESS = {
    "SOLVER__MAX_EPOCH": 100000,
    "TRAIN__CHECKPOINT_PERIOD": 100000,
    "TRAIN__EVAL_PERIOD": 100000,
    "DATA_LOADER__NUM_WORKERS": 2,
}
# A run that has failed ends in seconds; this is for a machine that has much else to do.
SECONDS = 60
START_SECONDS = 180


def own_copy(folder, video_set, *, times=1):
    """A list of videos in a folder of one's own, each video so many times in it."""
    videos = folder / "videos"
    shutil.copytree(video_set, videos)
    for split in ("train", "val", "test"):
        text = (video_set / f"{split}.csv").read_text().replace(str(video_set), str(videos))
        (folder / f"{split}.csv").write_text(text * (times if split == "train" else 1))
    return videos


def start_two_nodes(_folder, config):
    return start_nodes(config, 2)[0]


LAUNCHES = {
    "alone": lambda _folder, config: start("--cfg", config),
    "torchrun": lambda _folder, config: start_torchrun(config, 2),
    "nodes": start_two_nodes,
    "spawn": start_spawning,
}


@pytest.mark.parametrize(
    "launch", ["alone", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAUNCHES)[1:])]
)
def test_videos_that_go_away_end_the_run(tmp_path, video_set, launch):
    """The error is raised in a worker, while others are at work."""
    videos = own_copy(tmp_path, video_set)
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", tmp_path, output, **ENDLESS)
    process = LAUNCHES[launch](tmp_path, config)
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    videos.rename(tmp_path / "elsewhere")
    code, _, stderr = finish(process, SECONDS)
    assert code == 1
    assert "would not decode" in stderr or "will not decode" in stderr
    if launch == "alone":
        assert stderr.startswith("error: 10 videos in a row") and len(stderr.splitlines()) == 1


@linux_only
def test_killed_worker_hints_at_memory(tmp_path, video_set):
    output = tmp_path / "out"
    process = start("--cfg", write_config(tmp_path / "c.yaml", video_set, output, **ENDLESS))
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    code, _, stderr = finish(process, SECONDS)
    assert code == 1 and len(stderr.splitlines()) == 1
    assert "memory" in stderr and "lower DATA_LOADER.NUM_WORKERS" in stderr


SMALL_SHM = 'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'


def small_shm(size: str) -> tuple[str, ...]:
    """The beginning of a command that has so much shared memory."""
    return ("unshare", "--mount", "sh", "-c", SMALL_SHM.format(size=size), "sh")


def shm_can_be_made_small() -> bool:
    if not shutil.which("unshare"):
        return False
    return not subprocess.run([*small_shm("1m"), "true"], capture_output=True).returncode


@pytest.mark.parametrize(
    "size, what",
    [
        ("256k", "training"),
        pytest.param("256k", "testing", marks=pytest.mark.slow),
        pytest.param("8k", "training", marks=pytest.mark.slow),  # too small for the workers' locks
    ],
)
def test_small_shared_memory_is_said(tmp_path, video_set, size, what):
    if not shm_can_be_made_small():
        pytest.skip("mounting needs root, and `unshare`")
    changes: dict[str, Any] = dict(ENDLESS)
    if what == "testing":
        weights = tmp_path / "weights.pyth"
        config = write_config(tmp_path / "w.yaml", video_set, tmp_path)
        save(str(weights), {"model_state": build_model(load_config(config)).state_dict()})
        changes |= {"TRAIN__ENABLE": False, "TEST__CHECKPOINT_FILE_PATH": str(weights)}
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    command = [*small_shm(size), sys.executable, RUN_NET, "--cfg", str(config)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no room in the shared memory /dev/shm")
    assert "DATA_LOADER.NUM_WORKERS" in done.stderr and len(done.stderr.splitlines()) == 1


def fail(message):
    raise InputError(message)


def test_processes_of_a_machine_say_the_same_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not here"))
    monkeypatch.setattr(logging.root, "handlers", [])  # as before the log is opened

    def say(message):
        assert run_with_exit_code(lambda: fail(message)) == 2
        return capsys.readouterr().err

    for rank, message, said in (
        (1, "all", "error: all\n"),
        (0, "all", ""),
        (1, "mine", "error: mine\n"),
        (2, "mine too", "error: mine too\n"),
    ):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True, exist_ok=True)
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert say(message) == said
    # Another attempt, other processes and a process by itself say it again.
    (tmp_path / "attempt_1" / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_1" / "0" / "error.json"))
    assert say("all") == "error: all\n"
    monkeypatch.setenv(LAUNCH_DIR, str(tmp_path))
    assert [say("all"), say("all")] == ["error: all\n", ""]
    monkeypatch.setenv(LAUNCH_DIR, str(tmp_path / "not here"))
    assert [say("all"), say("all")] == ["error: all\n"] * 2
    monkeypatch.delenv(LAUNCH_DIR)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert [say("all"), say("all")] == ["error: all\n"] * 2


def test_ctrl_c_in_predict_keeps_what_is_done(
    tmp_path, clips, model, monkeypatch, capsys, in_process
):
    whole = Predictor.predict

    def predict(self, video, *rest):
        if video == clips[2]:
            # pytest's workers ignore the signal; a command does not.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        whole(self, video, *rest)

    monkeypatch.setattr(Predictor, "predict", predict)
    files = {name: str(tmp_path / f"out.{name}") for name in ("json", "csv")}
    flags = [*model.flags(), "--json", files["json"], "--csv", files["csv"]]
    assert predict_main([*flags, *clips]) == 130
    with open(files["json"]) as file:
        assert [row["path"] for row in json.load(file)["videos"]] == clips[:2]
    with open(files["csv"]) as file:
        assert {row["path"] for row in csv.DictReader(file)} == set(clips[:2])
    assert capsys.readouterr().err.startswith(f"error: interrupted at {clips[2]}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, video_set):
    """Six epochs, and the weights after the last."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = write_config(folder / "c.yaml", video_set, folder / "out", **SIX_EPOCHS)
    run_ok("--cfg", config)
    return load_checkpoint(folder / "out", LAST)["model_state"]


LAST = "checkpoint_epoch_00006.pyth"
SIX_EPOCHS = {
    "SOLVER__MAX_EPOCH": 6,
    "SOLVER__ACCUMULATE_STEPS": 2,
    "TRAIN__BATCH_SIZE": 1,
    "TRAIN__CHECKPOINT_PERIOD": 100,
    "TRAIN__EVAL_PERIOD": 100,
    "VIT__DROP_PATH": 0.3,
    "DATA_LOADER__NUM_WORKERS": 2,
    "TEST__ENABLE": False,
}


def stop_a_worker(pid: int) -> None:
    """The last process started is a worker of the training loader."""
    wait_for(lambda: len(children(pid)) >= 2)
    os.kill(children(pid)[-1], signal.SIGSTOP)


@linux_only
def test_stalled_workers_do_not_keep_a_signal_from_saving(tmp_path, video_set, uninterrupted):
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **SIX_EPOCHS)
    process = start("--cfg", config)
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    stop_a_worker(process.pid)
    time.sleep(1)  # what the other worker had prepared is used up
    os.kill(process.pid, signal.SIGTERM)
    code, _, stderr = finish(process, SECONDS)
    assert code == 75, stderr
    (saved,) = os.listdir(output / "checkpoints")
    assert saved in stderr and len(stderr.splitlines()) == 1
    run_ok("--cfg", config)
    assert same_tensors(load_checkpoint(output, LAST)["model_state"], uninterrupted)


SLOW_TO_LEAVE = """
import os, signal, sys, time
from slowfast_lara.engine.signals import StopRequest, ignore_signals

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(3)

kept = Slow()  # goes when Python has given its signal handlers back
stop = StopRequest().listen()
os.kill(os.getpid(), signal.SIGTERM)
while not stop.requested:
    pass
ignore_signals()
sys.exit(75)
"""


def test_no_timer_ends_a_process_that_is_slow_to_leave():
    code, _, stderr = finish(start(program=("-c", SLOW_TO_LEAVE)), SECONDS)
    assert code == 75, stderr


STALLED_AT_THE_END = """
import multiprocessing, os, signal, sys
from torch.utils.data import DataLoader
from slowfast_lara.engine.launch import _run_alone
from slowfast_lara.engine.signals import shield_workers

loader = shield_workers(DataLoader(range(4), num_workers=2, persistent_workers=True))

def run(cfg, stop):
    assert len(list(loader)) == 4
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGSTOP)

sys.exit(_run_alone(run, None))
"""


def test_workers_that_stall_after_the_last_batch_do_not_keep_a_run_from_ending():
    code, _, stderr = finish(start(program=("-c", STALLED_AT_THE_END)), SECONDS)
    assert code == 0, stderr


@linux_only
@pytest.mark.slow
def test_one_stalled_worker_of_two_nodes(tmp_path, video_set):
    """The signal goes to the node whose workers are well; both save at the same step."""
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **ENDLESS)
    nodes = start_nodes(config, 2)
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    stop_a_worker(nodes[1].pid)
    time.sleep(1)
    os.kill(nodes[0].pid, signal.SIGTERM)
    assert [finish(node, SECONDS)[0] for node in nodes] == [75, 75]
    assert len(os.listdir(output / "checkpoints")) == 1


@pytest.mark.parametrize(
    "first, second",
    [
        (signal.SIGTERM, signal.SIGTERM),
        pytest.param(signal.SIGTERM, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_second_signal_ends_at_once(tmp_path, video_set, first, second):
    """In an epoch that is one long step, so that the first one must wait."""
    own_copy(tmp_path, video_set, times=1000)
    output = tmp_path / "out"
    changes = {**ENDLESS, "SOLVER__ACCUMULATE_STEPS": 8000, "TRAIN__BATCH_SIZE": 2}
    process = start("--cfg", write_config(tmp_path / "c.yaml", tmp_path, output, **changes))
    wait_for(lambda: iterations(output) > 0, START_SECONDS)
    os.kill(process.pid, first)
    time.sleep(2 * SAME_REQUEST_SECONDS)
    assert process.poll() is None
    os.kill(process.pid, second)
    code, _, stderr = finish(process, SECONDS)
    assert code == 130 and stderr.startswith("error: interrupted")
    assert not (output / "checkpoints").exists()


LATE = """
import os, signal, sys, time
from slowfast_lara.engine.launch import _run_alone
from slowfast_lara.errors import Stopped

class Late:
    # Called when Python has ended all but its modules.
    def __del__(self, kill=os.kill, own=os.getpid(), words=sys.argv, sleep=time.sleep):
        if "signal" in words:
            kill(own, 15)
        sleep(2)  # the timer of a request rings every second

def run(cfg, stop):
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.requested:
        time.sleep(0.01)
    raise Stopped("saved")

late = Late()
sys.exit(_run_alone(run, None))
"""


def test_a_program_that_has_called_a_run_still_heeds_signals(in_process):
    """It may go on to other things, and starts processes that inherit what it ignores."""
    assert _run_alone(lambda cfg, stop: None, None) == 0
    assert all(signal.getsignal(number) is not signal.SIG_IGN for number in SIGNALS)


@pytest.mark.parametrize("also", ["", "signal"])
def test_nothing_changes_the_code_while_python_ends(also):
    code, _, stderr = finish(start(also, program=("-c", LATE)))
    assert (code, stderr) == (75, "error: saved\n")


@linux_only
@pytest.mark.slow
def test_second_signal_ends_a_process_that_waits_for_another(tmp_path, video_set):
    """The main thread is in a call into C, where Python heeds no signal."""
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **ENDLESS)
    nodes = start_nodes(config, 2)
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    os.kill(nodes[1].pid, signal.SIGSTOP)
    time.sleep(1)
    for _ in range(2):
        os.kill(nodes[0].pid, signal.SIGTERM)
        time.sleep(2 * SAME_REQUEST_SECONDS)
    code, _, stderr = finish(nodes[0], 15)
    assert code == 130, stderr
