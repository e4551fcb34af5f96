"""The timestamp cache: right frames always, and no error whatever its file contains."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from slowfast_lara.data import timestamps as timestamps_module
from slowfast_lara.data import video as video_module
from slowfast_lara.data.timestamps import FILE_NAME, TimestampCache, Timestamps, file_version
from slowfast_lara.data.video import read_clip, read_timestamps
from tests.helpers.videos import REPOSITORY, VIDEOS, decode_all, set_old, whole_frame, write_video

WANTED = np.arange(0, 40, 3)


def read(path: Path, cache: TimestampCache | None, wanted=WANTED) -> np.ndarray:
    frames = read_clip(
        str(path), lambda count, fps: np.minimum(wanted, count - 1), whole_frame, cache=cache
    )
    return frames.pixels[frames.order]


def cached(cache: TimestampCache, path: Path) -> Timestamps | None:
    return cache.get(str(path), file_version(str(path)))


@pytest.fixture
def demuxed(monkeypatch) -> list[str]:
    """The videos that were demuxed for their timestamps."""
    paths: list[str] = []

    def noted(path):
        paths.append(path)
        return read_timestamps(path)

    monkeypatch.setattr(video_module, "read_timestamps", noted)
    return paths


@pytest.fixture
def video(tmp_path) -> Path:
    return set_old(write_video(tmp_path / "a.mp4", 40, options={"g": "10", "bf": "2"}))


@pytest.mark.parametrize("exists", [True, False])
def test_cache_file_that_is_a_link(tmp_path, video, caplog, exists):
    target = tmp_path / "target"
    if exists:
        target.touch()
    (tmp_path / FILE_NAME).symlink_to(target)
    cache = TimestampCache(str(tmp_path))
    read(video, cache)
    cache.write()
    assert target.read_bytes() == b"" if exists else not target.exists()
    assert "symbolic link" in caplog.text


@pytest.mark.parametrize("name", [name for name in VIDEOS if "hidden" not in name])
def test_the_same_frames_with_a_cache(tmp_path, name):
    path = set_old(write_video(tmp_path / name, 40, **VIDEOS[name]))
    cache, rng = TimestampCache(str(tmp_path)), np.random.default_rng(1)
    chosen = [[0], [39], [3, 3, 3], range(0, 40, 4), range(40), [0, 39], [30, 31, 38]]
    frames = np.stack(decode_all(path)[0])
    for wanted in [*chosen, *(np.sort(rng.integers(0, 40, 5)) for _ in range(8))]:
        wanted = np.array(wanted)
        assert np.array_equal(read(path, cache, wanted), frames[wanted])
        cache.write()


def test_other_processes_use_the_entries(tmp_path, demuxed):
    paths = [set_old(write_video(tmp_path / f"{n}.mp4", 30 + n)) for n in range(4)]
    caches = [TimestampCache(str(tmp_path)) for _ in range(2)]
    for path, cache in zip(paths, caches * 2):
        read(path, cache)
    for cache in caches:
        cache.write()
    assert len(demuxed) == 4
    later = TimestampCache(str(tmp_path))
    for number, path in enumerate(paths):
        assert cached(later, path).num_frames == 30 + number
        assert np.array_equal(read(path, later, np.arange(9)), decode_all(path)[0][:9])
        assert cached(caches[0], path) is not None
    assert len(demuxed) == 4
    assert sorted(os.listdir(tmp_path)) == sorted([FILE_NAME, *(path.name for path in paths)])


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_replaced_video(tmp_path, keep_time):
    """Its modification time differs, or its size if a copy keeps the time."""
    path, cache = tmp_path / "a.mp4", TimestampCache(str(tmp_path))
    set_old(write_video(path, 40))
    read(path, cache)
    before = path.stat()
    other = set_old(write_video(tmp_path / "b.mp4", 50))
    if keep_time:
        os.utime(other, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert other.stat().st_size != before.st_size
    other.replace(path)
    wanted = np.array([0, 20, 49])
    for _ in range(2):
        assert np.array_equal(read(path, cache, wanted), np.stack(decode_all(path)[0])[wanted])


def test_a_video_replaced_between_lookup_and_decode(tmp_path, video, monkeypatch):
    cache = TimestampCache(str(tmp_path))
    other = set_old(write_video(tmp_path / "b.mp4", 50))
    wanted = np.array([0, 20, 39])
    read(video, cache, wanted)
    get = cache.get
    monkeypatch.setattr(cache, "get", lambda *args: (get(*args), shutil.copy2(other, args[0]))[0])
    assert np.array_equal(read(video, cache, wanted), np.stack(decode_all(other)[0])[wanted])


def test_a_video_changed_just_now_is_not_cached(tmp_path):
    """A second change within one tick of the clock would go unnoticed."""
    path, cache = write_video(tmp_path / "a.mp4"), TimestampCache(str(tmp_path))
    read(path, cache)
    assert cached(cache, path) is None
    set_old(path)
    read(path, cache)
    assert cached(cache, path).num_frames == 40
    later = time.time() + 1e6
    os.utime(path, (later, later))
    read(path, cache)
    assert cached(cache, path).num_frames == 40


READ = """
import sys
from pathlib import Path
from slowfast_lara.data.loader import train_loader
from tests.helpers.videos import config
folder, workers = sys.argv[1], int(sys.argv[2])
cfg = config(DATA__PATH_TO_DATA_DIR=folder, DATA_LOADER__NUM_WORKERS=workers)
assert len(list(train_loader(cfg, batch_size=1))) == 5
"""


@pytest.mark.parametrize("workers, processes", [(0, 1), (2, 1), (2, 3)])
def test_processes_write_at_exit(tmp_path, workers, processes):
    paths = [set_old(write_video(tmp_path / f"{n}.mp4", 20 + n)) for n in range(5)]
    (tmp_path / "train.csv").write_text("".join(f"{path} 0\n" for path in paths))
    command = [sys.executable, "-c", READ, str(tmp_path), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    running = [subprocess.Popen(command, cwd=REPOSITORY, env=environment) for _ in range(processes)]
    assert [process.wait(120) for process in running] == [0] * processes
    cache = TimestampCache(str(tmp_path))
    assert [cached(cache, path).num_frames for path in paths] == [20, 21, 22, 23, 24]


def test_a_folder_that_is_gone_is_not_created(tmp_path, video):
    folder = tmp_path / "lists"
    folder.mkdir()
    cache = TimestampCache(str(folder))
    read(video, cache)
    folder.rmdir()
    cache.write()
    assert not folder.exists()


def test_entries_are_written_in_batches(tmp_path, video, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(timestamps_module.time, "monotonic", lambda: now[0])
    cache = TimestampCache(str(tmp_path))
    cache.put(str(video), file_version(str(video)), read_timestamps(str(video)))
    assert not (tmp_path / FILE_NAME).exists()
    now[0] += 60
    cache.put(str(video), file_version(str(video)), read_timestamps(str(video)))
    assert (tmp_path / FILE_NAME).exists()


def write_foreign(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE videos (path BLOB, other TEXT)")


def write_noise(file: Path) -> None:
    file.write_bytes(np.random.default_rng(0).bytes(5000))


@pytest.mark.parametrize(
    "spoil", [write_foreign, write_noise, Path.mkdir, lambda file: file.write_bytes(b"no database")]
)
def test_an_unusable_file_is_ignored(tmp_path, video, spoil, caplog):
    spoil(tmp_path / FILE_NAME)
    before = (tmp_path / FILE_NAME).stat().st_size
    expected = np.stack(decode_all(video)[0])[WANTED]
    with caplog.at_level(logging.INFO):
        cache = TimestampCache(str(tmp_path))
        for _ in range(3):
            assert np.array_equal(read(video, cache), expected)
            cache.write()
    (record,) = caplog.records
    assert FILE_NAME in record.getMessage()
    assert (tmp_path / FILE_NAME).stat().st_size == before
    assert cached(cache, video) is not None  # in memory


def test_old_packet_indexes_are_ignored(tmp_path, video, caplog):
    (tmp_path / "packets.index").mkdir()
    (tmp_path / "packets.index" / "1.packets").write_bytes(b"packets2" + bytes(100))
    assert len(read(video, TimestampCache(str(tmp_path)))) == len(WANTED) and not caplog.records


def test_damaged_files_give_no_wrong_frames(tmp_path, video):
    cache = TimestampCache(str(tmp_path))
    expected = read(video, cache)
    cache.write()
    file, rng = tmp_path / FILE_NAME, np.random.default_rng(0)
    content = file.read_bytes()
    used = np.flatnonzero(np.frombuffer(content, np.uint8))
    damaged = [content[: len(content) * tenth // 10] for tenth in range(10)]
    for offset in rng.choice(used, 60):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << rng.integers(8)
        damaged.append(bytes(flipped))
    for other in damaged:
        file.write_bytes(other)
        later = TimestampCache(str(tmp_path))
        assert np.array_equal(read(video, later), expected)
        later.write()


def test_exchanged_entries_are_not_used(tmp_path):
    paths = [set_old(write_video(tmp_path / f"{n}.mp4", 30 + n)) for n in range(2)]
    cache = TimestampCache(str(tmp_path))
    for path in paths:
        read(path, cache)
    cache.write()
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        (pts,) = connection.execute("SELECT pts FROM videos ORDER BY path").fetchone()
        connection.execute("UPDATE videos SET pts = ?", (pts,))
    later = TimestampCache(str(tmp_path))
    assert [cached(later, path) is None for path in paths] == [False, True]


def test_a_folder_that_is_not_writable(tmp_path, video, monkeypatch, caplog):
    lists = tmp_path / "lists"
    lists.mkdir()
    connect = sqlite3.connect

    def read_only(file, **options):  # root may write anywhere
        return connect(file.replace("mode=rwc", "mode=ro"), **options)

    cache = TimestampCache(str(lists))
    read(video, cache)
    monkeypatch.setattr(timestamps_module.sqlite3, "connect", read_only)
    for _ in range(2):
        read(video, cache)
        cache.write()
    assert cached(cache, video).num_frames == 40  # in memory
    (record,) = caplog.records
    assert "Cannot write" in record.getMessage() and os.listdir(lists) == []


def test_a_read_only_file_is_read(tmp_path, video, demuxed):
    cache = TimestampCache(str(tmp_path))
    read(video, cache)
    cache.write()
    (tmp_path / FILE_NAME).chmod(0o400)
    read(video, TimestampCache(str(tmp_path)))
    assert len(demuxed) == 1


def test_a_locked_file_is_tried_again(tmp_path, video, monkeypatch, caplog):
    monkeypatch.setattr(timestamps_module, "LOCK_TIMEOUT", 0.01)
    cache, other = TimestampCache(str(tmp_path)), tmp_path / FILE_NAME
    read(video, cache)
    cache.write()
    with sqlite3.connect(other, isolation_level=None) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert cached(cache, video) is None
        assert len(read(video, cache)) == len(WANTED)
        cache.write()
        connection.execute("ROLLBACK")
    cache.write()
    assert cached(TimestampCache(str(tmp_path)), video).num_frames == 40 and not caplog.records


KILLED = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE videos SET num_frames = 7")
for number in range(500):
    row = (b"%d" % number, *range(7))
    connection.execute("INSERT INTO videos VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    connection.execute("UPDATE videos SET pts = ?", (bytes(200),))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_transaction_of_a_killed_process_is_rolled_back(tmp_path, video, demuxed, caplog):
    cache, file = TimestampCache(str(tmp_path)), tmp_path / FILE_NAME
    expected = read(video, cache)
    cache.write()
    subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False, timeout=120)
    assert (tmp_path / f"{FILE_NAME}-journal").stat().st_size
    later = TimestampCache(str(tmp_path))
    assert np.array_equal(read(video, later), expected)
    assert len(demuxed) == 1 and not caplog.records


def test_an_empty_file_is_filled(tmp_path, video, caplog):
    """As a process leaves it that was killed before its first transaction ended."""
    (tmp_path / FILE_NAME).touch()
    cache = TimestampCache(str(tmp_path))
    read(video, cache)
    cache.write()
    assert cached(TimestampCache(str(tmp_path)), video).num_frames == 40 and not caplog.records


@pytest.mark.parametrize("fps", [None, 29.97])
@pytest.mark.parametrize("pts", [None, [-5, 0, 3, 2**40]])
def test_entries_are_read_as_written(tmp_path, video, fps, pts):
    version, keys = file_version(str(video)), np.array(pts or [], np.int64)
    written = Timestamps(4, fps, None if pts is None else keys, keys[:2])
    cache = TimestampCache(str(tmp_path))
    cache.put(str(video), version, written)
    cache.write()
    found = pickle.loads(pickle.dumps(cache)).get(str(video), version)
    assert found[:2] == (4, fps) and np.array_equal(found.key_pts, keys[:2])
    assert found.pts is None if pts is None else np.array_equal(found.pts, pts)
