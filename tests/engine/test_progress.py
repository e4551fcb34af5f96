"""Progress bar on a terminal, `json_stats` lines elsewhere and in the log."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from tests.helpers.preloaded import environment
from tests.helpers.runs import RUN_NET, copy_lists, finish, json_stats, run_net, start, write_config


def test_a_terminal_shows_a_bar_and_the_log_has_lines(tmp_path, video_set):
    lists = copy_lists(tmp_path / "lists", video_set, train=10)
    config = write_config(tmp_path / "c.yaml", lists, tmp_path / "out", SOLVER__MAX_EPOCH=1)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    process = subprocess.Popen(
        [sys.executable, RUN_NET, "--cfg", str(config)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    text = shown.decode()
    for part in ("epoch 1/1:", "loss=", "top1=", "data=", "eta=", "train_epoch"):
        assert part in text
    assert "test:" in text and "0/7" in text and "test_final" in text
    assert "train_iter" not in text and "test_iter" not in text
    stats = json_stats(tmp_path / "out")
    assert sum(s.get("_type") == "train_iter" for s in stats) == 40
    assert sum(s.get("split") == "test_iter" for s in stats) == 7


def test_fields_of_the_iteration_lines(tmp_path, video_set):
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        tmp_path / "out",
        SOLVER__MAX_EPOCH=1,
        TEST__ENABLE=False,
        LOG_PERIOD=2,
        SOLVER__BASE_LR=1e-8,
    )
    code, stdout, stderr = run_net("--cfg", config)
    assert code == 0, stderr
    assert "epoch 1/1:" not in stdout + stderr
    lines = [s for s in json_stats(tmp_path / "out") if s.get("_type") == "train_iter"]
    assert [s["iter"] for s in lines] == ["2/4", "4/4"]
    for stats in lines:
        assert {"dt", "dt_data", "eta", "loss", "top1_err", "top5_err", "lr"} <= stats.keys()
        assert 0 < stats["lr"] <= 1e-8


BAR = """
import threading
from slowfast_lara.progress import progress_bar
with progress_bar(2, "test", unit="video") as bar:
    bar.update()
    print([thread.name for thread in threading.enumerate()])
"""


def test_a_bar_starts_no_thread():
    """A DataLoader worker that is forked while a thread starts may hang."""
    assert finish(start(program=("-c", BAR)))[:2] == (0, "['MainThread']\n")
