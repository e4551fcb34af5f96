"""The index of packets: when its files are written, by short processes too, and made one."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from slowfast_lara.data import packet_index
from slowfast_lara.data.decode import opened
from slowfast_lara.data.packet_index import PacketIndex, version_of
from slowfast_lara.data.packets import Packets, scan
from tests.data.test_packets import index_files, read, settle
from tests.helpers.videos import REPOSITORY, decode_all, write_video

FIND = """
import sys
from slowfast_lara.data.loader import train_loader
from tests.helpers.videos import config
folder, workers = sys.argv[1], int(sys.argv[2])
cfg = config(DATA__PATH_TO_DATA_DIR=folder, DATA_LOADER__NUM_WORKERS=workers)
assert len(list(train_loader(cfg, batch_size=1))) == 3
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_short_process_keeps_what_it_found(tmp_path, workers):
    paths = [settle(write_video(tmp_path / f"{n}.mp4", 20 + n)) for n in range(3)]
    (tmp_path / "train.csv").write_text("".join(f"{path} 0\n" for path in paths))
    command = [sys.executable, "-c", FIND, str(tmp_path), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=120)
    assert 1 <= len(index_files(tmp_path)) <= max(workers, 1)
    index = PacketIndex(str(tmp_path))
    assert [index.find(str(path))[1].num_frames for path in paths] == [20, 21, 22]


def test_a_folder_that_is_gone_is_not_made_again(tmp_path):
    folder = tmp_path / "lists"
    folder.mkdir()
    index = PacketIndex(str(folder))
    read(settle(write_video(tmp_path / "a.mp4")), index, np.arange(3))
    folder.rmdir()
    index.write()
    assert not folder.exists()


def test_files_are_written_ever_more_seldom(tmp_path, monkeypatch):
    index, now = PacketIndex(str(tmp_path)), [time.monotonic()]
    monkeypatch.setattr(packet_index.time, "monotonic", lambda: now[0])
    path = settle(write_video(tmp_path / "a.mp4"))
    written = []
    for second in range(3000):
        now[0] += 1
        version, _ = index.find(str(path))
        index.add(str(path), version, Packets(40, None, 30.0))
        if len(index_files(tmp_path)) > len(written):
            written.append(second)
    assert np.diff(written).round(-1).tolist() == [20, 40, 80, 160, 320, 600, 600, 600]


def test_many_files_become_one(tmp_path, monkeypatch):
    paths = [settle(write_video(tmp_path / f"{n}.mp4", 20 + n)) for n in range(6)]
    beside = PacketIndex(str(tmp_path))
    for path in [*paths, *paths]:
        index = PacketIndex(str(tmp_path))
        version = version_of(os.stat(path))
        with opened(str(path), 1) as (container, stream):
            index.add(str(path), version, scan(container, stream, str(path)))
        if path == paths[0]:
            beside.find(str(path))
        index.write()
    damaged = index_files(tmp_path)[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert len(index_files(tmp_path)) == 12
    monkeypatch.setattr(packet_index, "_MOST_FILES", 4)
    for _ in range(2):
        merged = PacketIndex(str(tmp_path))
        assert len(index_files(tmp_path)) == 1
        assert [merged.find(str(path))[1].num_frames for path in paths] == list(range(20, 26))
        assert np.array_equal(read(paths[3], merged, [7]), decode_all(paths[3])[0][7:8])
    beside._last_look -= 60
    assert [beside.find(str(path))[1].num_frames for path in paths] == list(range(20, 26))


def test_a_video_of_the_future_is_kept(tmp_path):
    path = settle(write_video(tmp_path / "a.mp4"))
    later = time.time() + 1e6
    os.utime(path, (later, later))
    index = PacketIndex(str(tmp_path))
    read(path, index, np.arange(3))
    assert index.find(str(path))[1].num_frames == 40
