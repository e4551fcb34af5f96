"""Clips read by an index of packets: the same frames to the bit, and none of another file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from slowfast_lara.data import decode, packet_index
from slowfast_lara.data.decode import Region, read_span
from slowfast_lara.data.packet_index import PacketIndex, pack, unpack, version_of
from slowfast_lara.data.packets import Packets, needed_packets, scan
from slowfast_lara.errors import DecodeError
from tests.data.test_decode import VIDEOS, whole
from tests.helpers.videos import NEEDS_REAL_VIDEOS, REPOSITORY, decode_all, real_videos, write_video

H264 = {
    "prepared.mp4": {"options": {"bf": "7", "g": "16", "x264-params": "b-pyramid=none:b-adapt=0"}},
    "pyramid.mp4": {"options": {"bf": "5", "g": "30", "x264-params": "b-pyramid=strict:ref=4"}},
    "slices.mp4": {"options": {"bf": "3", "g": "12", "x264-params": "slices=4"}},
    "interlaced.mp4": {"options": {"bf": "2", "g": "12", "x264-params": "tff=1"}},
    "with_sound.mp4": {"options": {"bf": "2", "g": "10"}, "audio": True},
    "odd_times.mp4": {"options": {"bf": "2", "g": "10"}, "pts": np.cumsum([7, 90] * 20).tolist()},
    "quicktime.mov": {"options": {"bf": "2", "g": "10"}},
    "refresh.mp4": {"options": {"x264-params": "intra-refresh=1", "g": "10"}},
}


def settle(path: Path) -> Path:
    """As if it had been written an hour ago: what is changed just now is not kept."""
    an_hour_ago = path.stat().st_mtime - 3600
    os.utime(path, (an_hour_ago, an_hour_ago))
    return path


def read(path: Path, index: PacketIndex | None, wanted) -> np.ndarray:
    def choose(count: int, fps: float) -> np.ndarray:
        return np.minimum(wanted, count - 1)

    frames = read_span(str(path), choose, whole, index=index)
    return frames.pixels[frames.order]


@pytest.fixture
def opened_containers(monkeypatch) -> list[str]:
    opened, right = [], decode.open_container
    monkeypatch.setattr(decode, "open_container", lambda path: opened.append(path) or right(path))
    return opened


@pytest.mark.parametrize("name", [*H264, *VIDEOS])
def test_the_same_frames_with_an_index(tmp_path, name, opened_containers):
    options = {**H264, **VIDEOS}[name]
    path = settle(write_video(tmp_path / name, 40, **options))
    index, rng = PacketIndex(str(tmp_path)), np.random.default_rng(1)
    every = [[0], [39], [3, 3, 3], range(0, 40, 4), range(40), [0, 39], [30, 31, 38]]
    some = [np.sort(rng.integers(0, 40, rng.integers(1, 9))) for _ in range(15)]
    for wanted in [*every, *some]:
        expected = read(path, None, np.array(wanted))
        assert np.array_equal(read(path, index, np.array(wanted)), expected)
    if name in ("prepared.mp4", "pyramid.mp4", "slices.mp4", "with_sound.mp4", "quicktime.mov"):
        opened_containers.clear()
        read(path, index, np.array([5, 20]))
        assert opened_containers == []


@NEEDS_REAL_VIDEOS
@pytest.mark.parametrize("path", real_videos(), ids=lambda path: path.name)
def test_real_videos(path, tmp_path):
    index, rng = PacketIndex(str(tmp_path)), np.random.default_rng(0)
    for _ in range(4):
        wanted = rng.integers(0, 60) + 4 * np.arange(8)
        assert np.array_equal(read(path, index, wanted), read(path, None, wanted))


def test_only_what_is_referred_to_is_read(tmp_path):
    options = H264["prepared.mp4"]["options"]
    path = write_video(tmp_path / "a.mp4", 64, options={**options, "sc_threshold": "0"})
    with av.open(str(path)) as container:
        packets = scan(container, container.streams.video[0], str(path))
    stored = packets.stored
    # I B B B B B B B P B B B B B B P, and again: 0 and 16 start anew, 8 and 15 are referred to.
    shown = lambda numbers: sorted(  # noqa: E731
        np.searchsorted(packets.pts, stored.pts[numbers]).tolist()
    )
    assert shown(needed_packets(stored, packets.pts[[0]])) == [0]
    assert shown(needed_packets(stored, packets.pts[[5]])) == [0, 5, 8]
    assert shown(needed_packets(stored, packets.pts[[8]])) == [0, 8]
    assert shown(needed_packets(stored, packets.pts[[2, 33]])) == [0, 2, 8, 32, 33, 40]
    assert shown(needed_packets(stored, packets.pts[[63]])) == [48, 56, 63]


@pytest.mark.parametrize("keep_time", [False, True])
def test_a_replaced_video_is_scanned_again(tmp_path, keep_time):
    """By its time of change, or by its size where a copy keeps the time."""
    path, index = tmp_path / "a.mp4", PacketIndex(str(tmp_path))
    settle(write_video(path, 40))
    read(path, index, np.arange(3))
    before = path.stat()
    other = settle(write_video(tmp_path / "b.mp4", 50))
    if keep_time:
        os.utime(other, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert other.stat().st_size != before.st_size
    other.replace(path)
    wanted = np.array([0, 20, 49])
    assert np.array_equal(read(path, index, wanted), read(path, None, wanted))


def test_a_video_replaced_while_it_is_read(tmp_path, monkeypatch):
    path, index = tmp_path / "a.mp4", PacketIndex(str(tmp_path))
    settle(write_video(path, 40))
    other = settle(write_video(tmp_path / "b.mp4", 50))
    wanted = np.array([0, 20, 39])
    expected = read(other, None, wanted)
    read(path, index, wanted)
    right = index.find
    monkeypatch.setattr(index, "find", lambda name: (right(name), shutil.copy2(other, name))[0])
    assert np.array_equal(read(path, index, wanted), expected)


def test_packets_of_another_version_are_not_read(tmp_path):
    path = write_video(tmp_path / "a.mp4", options={"g": "8"})
    with av.open(str(path)) as container:
        packets = scan(container, container.streams.video[0], str(path))
    version, wanted = version_of(path.stat()), packets.pts[[3, 9]]

    def decoded(version):
        return decode._decode_stored(str(path), version, packets.stored, wanted, whole, 1)

    assert np.array_equal(decoded(version), read(path, None, np.array([3, 9])))
    for other in ((version[0] + 1, version[1]), (version[0], version[1] + 1), None):
        assert decoded(other) is None


def test_a_video_just_written_is_not_kept(tmp_path):
    """A second change within the same tick of the clock would not be seen."""
    path, index = write_video(tmp_path / "a.mp4"), PacketIndex(str(tmp_path))
    read(path, index, np.arange(3))
    assert index.find(str(path))[1] is None
    settle(path)
    read(path, index, np.arange(3))
    assert index.find(str(path))[1].num_frames == 40


def index_files(folder: Path) -> list[Path]:
    return sorted((folder / packet_index.FOLDER).glob("*.packets"))


def test_later_processes_know_what_earlier_ones_found(tmp_path, opened_containers):
    paths = [settle(write_video(tmp_path / f"{n}.mp4", 30 + n)) for n in range(4)]
    indices = [PacketIndex(str(tmp_path)) for _ in range(2)]
    for path, index in zip(paths, indices * 2):
        read(path, index, np.arange(3))
    for index in indices:
        index.write()
    assert len(index_files(tmp_path)) == 2
    opened_containers.clear()
    later = PacketIndex(str(tmp_path))
    for number, path in enumerate(paths):
        assert later.find(str(path))[1].num_frames == 30 + number
        assert np.array_equal(read(path, later, np.arange(9)), decode_all(path)[0][:9])
    assert opened_containers == []
    for index in indices:  # what the other has written is seen when it is missed
        index._last_look -= 60
        assert all(index.find(str(path))[1] is not None for path in paths)


WRITE = """
import sys
import numpy as np
from slowfast_lara.data.packet_index import PacketIndex
from tests.data.test_packets import read
from pathlib import Path
folder = Path(sys.argv[1])
index = PacketIndex(str(folder))
for path in sorted(folder.glob("*.mp4")):
    read(path, index, np.arange(3))
    index.write()
"""


def test_several_processes_at_once(tmp_path):
    paths = [settle(write_video(tmp_path / f"{n}.mp4", 20 + n)) for n in range(5)]
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    running = [subprocess.Popen(command, cwd=REPOSITORY, env=environment) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert not list((tmp_path / packet_index.FOLDER).glob(".writing-*"))
    index = PacketIndex(str(tmp_path))
    assert [index.find(str(path))[1].num_frames for path in paths] == [20, 21, 22, 23, 24]


def test_a_damaged_index_does_no_harm(tmp_path):
    path = settle(write_video(tmp_path / "a.mp4", 40, options={"g": "10", "bf": "2"}))
    index = PacketIndex(str(tmp_path))
    expected = read(path, index, np.arange(0, 40, 3))
    index.write()
    (file,) = index_files(tmp_path)
    content, rng = file.read_bytes(), np.random.default_rng(0)
    damaged = [content[: len(content) * tenth // 10] for tenth in range(10)]
    for _ in range(40):
        flipped = bytearray(content)
        flipped[rng.integers(len(content))] ^= 1 << rng.integers(8)
        damaged.append(bytes(flipped))
    for other in (*damaged, rng.bytes(300), b"packets2" + b"\xff" * 400):
        file.write_bytes(other)
        later = PacketIndex(str(tmp_path))
        assert np.array_equal(read(path, later, np.arange(0, 40, 3)), expected)


def test_entries_that_are_exchanged_do_not_count(tmp_path):
    paths = [settle(write_video(tmp_path / f"{n}.mp4", 30 + n)) for n in range(2)]
    index = PacketIndex(str(tmp_path))
    for path in paths:
        read(path, index, np.arange(3))
    index.write()
    (file,) = index_files(tmp_path)
    content = np.fromfile(file, np.uint8)
    rows = packet_index._rows_of(content)
    rows[["start", "length"]] = rows[["start", "length"]][::-1].copy()
    content.tofile(file)
    later = PacketIndex(str(tmp_path))
    assert [later.find(str(path))[1] for path in paths] == [None, None]


@pytest.mark.parametrize("kind", ["a file in its place", "read only"])
def test_a_folder_that_cannot_be_written(tmp_path, kind, monkeypatch):
    path = settle(write_video(tmp_path / "a.mp4"))
    lists = tmp_path / "lists"
    lists.mkdir()
    if kind == "read only":
        lists.chmod(0o500)

        def refuse(*_):  # root may write anywhere
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(packet_index, "atomic_write", refuse)
    else:
        (lists / packet_index.FOLDER).touch()
    index = PacketIndex(str(lists))
    for _ in range(2):
        read(path, index, np.arange(3))
        index.write()
    assert index.find(str(path))[1].num_frames == 40  # remembered
    assert index_files(lists) == []


def test_a_full_disk_ends_only_the_writing(tmp_path, monkeypatch):
    path, index = settle(write_video(tmp_path / "a.mp4")), PacketIndex(str(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packet_index, "atomic_write", full)
    read(path, index, np.arange(3))
    index.write()
    assert len(read(path, index, np.arange(5))) == 5


def test_bytes_and_back():
    for fps in (None, 29.97):
        for pts in (None, np.array([-5, 0, 3, 2**40])):
            packets = Packets(7 if pts is None else 4, pts, fps)
            again = unpack(pack(packets))
            assert (again.num_frames, again.fps, again.stored) == (packets.num_frames, fps, None)
            assert np.array_equal(again.pts, pts) if pts is not None else again.pts is None


def test_what_is_no_video_is_named(tmp_path):
    index = PacketIndex(str(tmp_path))
    for name, content in (("a.mp4", b"no video"), ("b.mp4", b"")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DecodeError, match=name):
            read(settle(path), index, np.arange(3))
    with pytest.raises(DecodeError, match="absent"):
        read(tmp_path / "absent.mp4", index, np.arange(3))


def test_a_crop_is_the_same_to_the_bit(tmp_path):
    path = settle(write_video(tmp_path / "a.mp4", options={"g": "8"}))
    index = PacketIndex(str(tmp_path))
    region = Region(7, 11, 24, 33, 20, 20)

    def crop(index):
        return read_span(str(path), lambda n, fps: np.arange(n), lambda *_: region, index=index)

    assert np.array_equal(crop(index).pixels, crop(None).pixels)
    assert np.array_equal(crop(index).pixels, crop(None).pixels)
