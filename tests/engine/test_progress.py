"""A bar on a terminal, lines elsewhere; the log always has the lines."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from tests.helpers.preloaded import environment
from tests.helpers.runs import RUN_NET, json_stats, write_config


def test_terminal_has_a_bar_and_the_log_has_lines(tmp_path, video_set):
    lists = tmp_path / "lists"
    lists.mkdir()
    for split, times in (("train", 10), ("val", 1), ("test", 1)):
        (lists / f"{split}.csv").write_text((video_set / f"{split}.csv").read_text() * times)
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
    except OSError:  # how a terminal ends
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


def test_lines_have_what_a_reader_needs(tmp_path, video_set):
    config = write_config(
        tmp_path / "c.yaml",
        video_set,
        tmp_path / "out",
        SOLVER__MAX_EPOCH=1,
        TEST__ENABLE=False,
        LOG_PERIOD=2,
        SOLVER__BASE_LR=1e-8,
    )
    done = subprocess.run(
        [sys.executable, RUN_NET, "--cfg", str(config)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 1/1:" not in done.stdout + done.stderr
    lines = [s for s in json_stats(tmp_path / "out") if s.get("_type") == "train_iter"]
    assert [s["iter"] for s in lines] == ["2/4", "4/4"]
    for stats in lines:
        assert {"dt", "dt_data", "eta", "loss", "top1_err", "top5_err", "lr"} <= stats.keys()
        assert 0 < stats["lr"] <= 1e-8
