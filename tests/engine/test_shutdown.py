"""Shutdown after failures and signals, and with workers that hang."""

from __future__ import annotations

import csv
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest

from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import run_process
from slowfast_lara.engine.signals import SAME_REQUEST_SECONDS, SIGNALS
from slowfast_lara.errors import LAUNCH_DIR, InputError, run_with_exit_code
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models import build_model
from slowfast_lara.runs.checkpoint import save
from tests.helpers.commands import predict as predict_main
from tests.helpers.isolation import can_limit_shm, small_shm
from tests.helpers.launchers import (
    descendants,
    iterations,
    linux_only,
    start_nodes,
    start_spawning,
    start_torchrun,
)
from tests.helpers.preloaded import environment
from tests.helpers.runs import (
    RUN_NET,
    copy_set,
    finish,
    free_port,
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
# Failed runs end within seconds; the limit allows for a loaded machine.
SECONDS = 60
START_SECONDS = 180


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
def test_missing_videos_end_the_run(tmp_path, video_set, launch):
    """One worker raises the error while the others decode."""
    videos = copy_set(tmp_path, video_set)
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", tmp_path, output, **ENDLESS)
    process = LAUNCHES[launch](tmp_path, config)
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    videos.rename(tmp_path / "elsewhere")
    code, _, stderr = finish(process, SECONDS)
    assert code == 1
    assert "decode" in stderr
    if launch == "alone":
        assert "10 videos" in stderr and len(stderr.splitlines()) == 1


@linux_only
def test_killed_worker_hints_at_memory(tmp_path, video_set):
    output = tmp_path / "out"
    process = start("--cfg", write_config(tmp_path / "c.yaml", video_set, output, **ENDLESS))
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    os.kill(descendants(process.pid)[-1], signal.SIGKILL)
    code, _, stderr = finish(process, SECONDS)
    assert code == 1 and len(stderr.splitlines()) == 1
    assert "memory" in stderr and "DATA_LOADER.NUM_WORKERS" in stderr


@pytest.mark.parametrize(
    "size, what",
    [
        ("256k", "training"),
        pytest.param("256k", "testing", marks=pytest.mark.slow),
        pytest.param("8k", "training", marks=pytest.mark.slow),  # too small for the workers' locks
    ],
)
def test_full_shared_memory_is_named(tmp_path, video_set, size, what):
    if not can_limit_shm():
        pytest.skip("needs root and `unshare`")
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
    assert done.stderr.startswith("error: ") and "/dev/shm" in done.stderr
    assert "DATA_LOADER.NUM_WORKERS" in done.stderr and len(done.stderr.splitlines()) == 1


def fail(message):
    raise InputError(message)


def test_processes_of_a_node_report_the_same_error_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not here"))
    monkeypatch.setattr(logging.root, "handlers", [])  # as before the log is opened

    def report(message):
        assert run_with_exit_code(lambda: fail(message)) == 2
        return capsys.readouterr().err

    for rank, message, expected in (
        (1, "all", "error: all\n"),
        (0, "all", ""),
        (1, "mine", "error: mine\n"),
        (2, "mine too", "error: mine too\n"),
    ):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True, exist_ok=True)
        file = tmp_path / "attempt_0" / str(rank) / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert report(message) == expected
    # Another attempt, another launcher and a single process report it again.
    (tmp_path / "attempt_1" / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_1" / "0" / "error.json"))
    assert report("all") == "error: all\n"
    monkeypatch.setenv(LAUNCH_DIR, str(tmp_path))
    assert [report("all"), report("all")] == ["error: all\n", ""]
    monkeypatch.setenv(LAUNCH_DIR, str(tmp_path / "not here"))
    assert [report("all"), report("all")] == ["error: all\n"] * 2
    monkeypatch.delenv(LAUNCH_DIR)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert [report("all"), report("all")] == ["error: all\n"] * 2


def test_ctrl_c_in_predict_writes_the_finished_videos(
    tmp_path, clips, model, monkeypatch, capsys, in_process
):
    score = TrainedModel.__call__

    def interrupted_score(self, video, **options):
        if video == clips[2]:
            # Worker processes of pytest ignore SIGINT; a command does not.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return score(self, video, **options)

    monkeypatch.setattr(TrainedModel, "__call__", interrupted_score)
    files = {name: str(tmp_path / f"out.{name}") for name in ("json", "csv")}
    flags = [*model.flags(), "--json", files["json"], "--csv", files["csv"]]
    assert predict_main([*flags, *clips]) == 130
    with open(files["json"]) as file:
        assert [row["path"] for row in json.load(file)["videos"]] == clips[:2]
    with open(files["csv"]) as file:
        assert {row["path"] for row in csv.DictReader(file)} == set(clips[:2])
    message = capsys.readouterr().err
    assert "interrupted" in message and clips[2] in message


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, video_set):
    """Return the weights after three epochs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = write_config(folder / "c.yaml", video_set, folder / "out", **THREE_EPOCHS)
    run_ok("--cfg", config)
    return load_checkpoint(folder / "out", LAST)["model_state"]


LAST = "checkpoint_epoch_00003.pyth"
THREE_EPOCHS = {
    "SOLVER__MAX_EPOCH": 3,
    "SOLVER__ACCUMULATE_STEPS": 2,
    "TRAIN__BATCH_SIZE": 1,
    "TRAIN__CHECKPOINT_PERIOD": 100,
    "TRAIN__EVAL_PERIOD": 100,
    "VIT__DROP_PATH": 0.3,
    "DATA_LOADER__NUM_WORKERS": 2,
    "TEST__ENABLE": False,
}


def suspend_a_worker(pid: int) -> None:
    """Suspend the last process started, which is a worker of the training loader."""
    wait_for(lambda: len(descendants(pid)) >= 2)
    os.kill(descendants(pid)[-1], signal.SIGSTOP)


# Waits 1 s instead of 5 s for a batch after a signal.
IMPATIENT = f"""
import runpy
from slowfast_lara.engine import signals
signals.PATIENCE_SECONDS = 1
runpy.run_path({RUN_NET!r}, run_name="__main__")
"""


@linux_only
def test_a_signal_saves_although_workers_hang(tmp_path, video_set, uninterrupted):
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **THREE_EPOCHS)
    process = start("--cfg", config, program=("-c", IMPATIENT))
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    suspend_a_worker(process.pid)
    time.sleep(1)  # until the batches of the other worker are used up
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

kept = Slow()  # deleted after Python has restored the default signal handlers
stop = StopRequest().listen()
os.kill(os.getpid(), signal.SIGTERM)
while not stop.requested:
    pass
ignore_signals()
sys.exit(75)
"""


def test_no_timer_kills_a_process_that_exits_slowly():
    code, _, stderr = finish(start(program=("-c", SLOW_TO_LEAVE)), SECONDS)
    assert code == 75, stderr


STALLED_AT_THE_END = """
import multiprocessing, os, signal, sys
from torch.utils.data import DataLoader
from slowfast_lara.engine.launch import run_process
from slowfast_lara.engine.signals import shield_workers

loader = shield_workers(DataLoader(range(4), num_workers=2, persistent_workers=True))

def run(cfg, stop):
    assert len(list(loader)) == 4
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGSTOP)

sys.exit(run_process(run, None))
"""


def test_a_run_ends_although_workers_hang_after_the_last_batch():
    code, _, stderr = finish(start(program=("-c", STALLED_AT_THE_END)), SECONDS)
    assert code == 0, stderr


BUSY_THREAD = """
import sys, threading, torch
from slowfast_lara.config import load_config
from slowfast_lara.engine.launch import RankInfo, run_process

def multiply():
    x = torch.rand(50, 50)
    while True:
        x @ x

def run(cfg, stop):
    threading.Thread(target=multiply, daemon=True).start()

rank, port = map(int, sys.argv[2:])
sys.exit(run_process(run, load_config(sys.argv[1]), RankInfo(rank, 2, 0, "localhost", port)))
"""


def test_a_rank_exits_although_a_thread_is_inside_pytorch(tmp_path, video_set):
    """Like a thread of gloo, which outlives the process group; Python would abort."""
    config, port = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out"), free_port()
    ranks = [start(config, rank, port, program=("-c", BUSY_THREAD)) for rank in range(2)]
    for rank in ranks:
        code, _, stderr = finish(rank, SECONDS)
        assert code == 0, stderr


@linux_only
@pytest.mark.slow
def test_two_nodes_save_although_a_worker_of_one_hangs(tmp_path, video_set):
    """The other node receives the signal; both save at the same step."""
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **ENDLESS)
    nodes = start_nodes(config, 2)
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    suspend_a_worker(nodes[1].pid)
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
    """The epoch is one optimiser step, so that the run cannot save soon after the first signal."""
    copy_set(tmp_path, video_set, repeat_train=1000)
    output = tmp_path / "out"
    changes = {**ENDLESS, "SOLVER__ACCUMULATE_STEPS": 8000, "TRAIN__BATCH_SIZE": 2}
    process = start("--cfg", write_config(tmp_path / "c.yaml", tmp_path, output, **changes))
    wait_for(lambda: iterations(output) > 0, START_SECONDS)
    os.kill(process.pid, first)
    time.sleep(2 * SAME_REQUEST_SECONDS)
    assert process.poll() is None
    os.kill(process.pid, second)
    code, _, stderr = finish(process, SECONDS)
    assert code == 130 and "interrupted" in stderr
    assert not (output / "checkpoints").exists()


@linux_only
@pytest.mark.parametrize("launch", ["alone", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_signal_saves_although_nobody_reads_the_output(tmp_path, video_set, launch):
    """Ctrl-C also ends the `tee` that reads the output."""
    output = tmp_path / "out"
    config = write_config(tmp_path / "c.yaml", video_set, output, **ENDLESS)
    process = LAUNCHES[launch](tmp_path, config)
    wait_for(lambda: iterations(output) > 3, START_SECONDS)
    process.stdout.close()
    process.stderr.close()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(SECONDS) == 75
    assert list((output / "checkpoints").iterdir())


LATE = """
import os, signal, sys, time
from slowfast_lara.engine.launch import run_process
from slowfast_lara.errors import Stopped

class Late:
    # Called while Python clears its modules at exit.
    def __del__(self, kill=os.kill, own=os.getpid(), words=sys.argv, sleep=time.sleep):
        if "signal" in words:
            kill(own, 15)
        sleep(2)  # the timer of a request fires every second

def run(cfg, stop):
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.requested:
        time.sleep(0.01)
    raise Stopped("saved")

late = Late()
sys.exit(run_process(run, None))
"""


def test_a_program_handles_signals_after_a_run(in_process):
    """Its later child processes would inherit ignored signals."""
    assert run_process(lambda cfg, stop: None, None) == 0
    assert all(signal.getsignal(number) is not signal.SIG_IGN for number in SIGNALS)


@pytest.mark.parametrize("also", ["", "signal"])
def test_signals_do_not_change_the_exit_code_during_shutdown(also):
    code, _, stderr = finish(start(also, program=("-c", LATE)))
    assert (code, stderr) == (75, "error: saved\n")


@linux_only
@pytest.mark.slow
def test_a_second_signal_ends_a_rank_that_waits_for_another(tmp_path, video_set):
    """The main thread is in C code, where Python runs no signal handler."""
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
