"""What `packets.py` found out about the videos of a list, kept in a folder beside the list.

A video is scanned when it is first read; later epochs, runs and processes know its packets
from here. Each process writes what it has found as a file of its own, aside and renamed, so
that any number of them may work at once: now and then, ever more seldom, and when it ends. All
files are read, through shared memory; who makes an index and finds many of them makes them one.
An entry counts only while its video has the size and the time of change that it had, and only
if its checksum is right. Where the folder cannot be written, a process remembers what it
found itself.

A file: a magic word, the number of rows, the rows (`_ROW`), then the entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Iterable
from multiprocessing.util import Finalize

import numpy as np

from slowfast_lara.data.packets import Packets, StoredPackets
from slowfast_lara.files import atomic_write

FOLDER = "packets.index"
_SUFFIX, _MAGIC = ".packets", b"packets2"
_ROW = np.dtype(
    [
        ("video", "<u8"),
        ("size", "<i8"),
        ("changed", "<i8"),
        ("start", "<i8"),
        ("length", "<u4"),
        ("checksum", "<u4"),
    ]
)
_HEAD = struct.Struct("<dqII?")
# What is found is written after so many videos, or so many seconds: at first, and at most.
_VIDEOS_OF_A_FILE, _FIRST_SECONDS, _MOST_SECONDS = 1000, 10.0, 600.0
# What others have written is looked for after so many seconds.
_SECONDS_OF_A_LOOK = 10.0
# More files become one.
_MOST_FILES = 64
# Where nothing can be written, a process remembers this many videos.
_REMEMBERED = 10_000
# Of a file changed a moment ago the time would not tell a second change.
_SETTLED_NS = 2_000_000_000

Version = tuple[int, int]


def version_of(status: os.stat_result) -> Version:
    """By what it is known whether a file is still the same."""
    return status.st_size, status.st_mtime_ns


class PacketIndex:
    """The index of the videos of a list, in `folder`; an object can be sent to a worker."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(os.path.abspath(folder), FOLDER)
        self._found: dict[tuple[int, Version], bytes] = {}
        self._unwritten: list[tuple[int, Version]] = []
        self._can_write = True
        self._last_write = self._last_look = time.monotonic()
        self._seconds_of_a_file = _FIRST_SECONDS
        self._process = 0
        self._forget()
        self._merge()

    def _forget(self) -> None:
        self._files: list[np.ndarray] = []
        self._names: set[str] = set()
        self._videos = np.empty(0, np.uint64)
        self._where = np.empty((0, 2), np.int32)

    def __getstate__(self) -> dict:
        state = dict(self.__dict__)
        for name in ("_files", "_names", "_videos", "_where"):
            del state[name]
        return {**state, "_process": 0}  # it has not begun to work

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def find(self, path: str) -> tuple[Version | None, Packets | None]:
        """The version of the video as it is now, and what is known of it."""
        try:
            version = version_of(os.stat(path))
        except (OSError, ValueError):
            return None, None
        self._write_now_and_then()
        video = _video_number(path)
        entry = self._found.get((video, version)) or self._stored_entry(video, version)
        try:
            return version, None if entry is None else unpack(entry)
        except (ValueError, struct.error, zlib.error):
            return version, None

    def add(self, path: str, version: Version, packets: Packets) -> None:
        """Remember what was found in the video, if it was this version before and still is."""
        if version_of(os.stat(path)) != version or abs(time.time_ns() - version[1]) < _SETTLED_NS:
            return
        key = (_video_number(path), version)
        self._found[key] = pack(packets)
        self._unwritten.append(key)
        self._write_now_and_then()

    def _write_now_and_then(self) -> None:
        since = time.monotonic() - self._last_write
        if len(self._unwritten) >= _VIDEOS_OF_A_FILE or (
            self._unwritten and since > self._seconds_of_a_file
        ):
            self._seconds_of_a_file = min(2 * self._seconds_of_a_file, _MOST_SECONDS)
            self.write()

    def write(self) -> None:
        """Write down what is not written yet, if the folder can be written."""
        self._write_found()
        self._last_write, self._unwritten = time.monotonic(), []
        if self._can_write:
            self._found.clear()
            self._look()
        for key in list(self._found)[:-_REMEMBERED]:
            del self._found[key]

    def _write_found(self) -> None:
        found = [(*key, self._found[key]) for key in self._unwritten]
        rows = [(number, *version, 0, len(e), zlib.crc32(e)) for number, version, e in found]
        # At the end of a process, a folder for the time being may be gone.
        if rows and self._can_write and os.path.isdir(os.path.dirname(self._folder)):
            try:
                self._write_file(np.array(rows, _ROW), (entry for *_, entry in found))
            except OSError:  # nothing depends on it: the next run scans these videos again
                self._can_write = False

    def _write_file(self, rows: np.ndarray, entries: Iterable[bytes]) -> None:
        """The rows say all of their entries but where they will start."""
        ends = len(_MAGIC) + 8 + rows.nbytes + np.cumsum(rows["length"], dtype=np.int64)
        rows["start"] = ends - rows["length"]
        name = f"{os.getpid()}-{time.time_ns()}{_SUFFIX}"
        with atomic_write(os.path.join(self._folder, name)) as aside, open(aside, "wb") as file:
            file.write(_MAGIC + struct.pack("<q", len(rows)) + rows.tobytes())
            file.writelines(entries)

    def _merge(self) -> None:
        """Make many files one. Who reads the others has them open, or finds them in that one."""
        self._look()
        if len(self._names) <= _MOST_FILES:
            return
        kept = {
            row[["video", "size", "changed"]].tobytes(): (row, content)
            for content in self._files
            for row in _rows_of(content)
            if _entry_of(content, row) is not None
        }
        entries = (_entry_of(content, row) or b"" for row, content in kept.values())
        with contextlib.suppress(OSError):  # it can be read all the same
            self._write_file(np.array([row for row, _ in kept.values()], _ROW), entries)
            for name in self._names:
                os.remove(os.path.join(self._folder, name))
            self._forget()
            self._look()

    def _stored_entry(self, video: int, version: Version) -> bytes | None:
        if self._process != os.getpid():  # a fork has its own view of what is there
            self._process = os.getpid()
            self._unwritten = []  # the process that it was forked from will write these
            Finalize(None, self._write_found, exitpriority=0)
            self._look()
        entry = self._in_files(video, version)
        if entry is None and time.monotonic() - self._last_look > _SECONDS_OF_A_LOOK:
            self._look()
            entry = self._in_files(video, version)
        return entry

    def _in_files(self, video: int, version: Version) -> bytes | None:
        wanted = np.uint64(video)
        first = int(np.searchsorted(self._videos, wanted))
        last = int(np.searchsorted(self._videos, wanted, side="right"))
        for number, place in self._where[first:last]:
            content = self._files[number]
            row = _rows_of(content)[place]
            if (int(row["size"]), int(row["changed"])) == version:
                entry = _entry_of(content, row)
                if entry is not None:
                    return entry
        return None

    def _look(self) -> None:
        """Read what other processes have written since."""
        self._last_look = time.monotonic()
        try:
            names = {name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)}
        except OSError:
            return
        for name in sorted(names - self._names):
            self._names.add(name)
            content = _map(os.path.join(self._folder, name))
            if content is not None:
                self._files.append(content)
        rows = [_rows_of(content)["video"] for content in self._files]
        videos = np.concatenate([np.empty(0, np.uint64), *rows])
        order = np.argsort(videos, kind="stable")
        where = [np.stack([np.full(len(r), n), np.arange(len(r))], 1) for n, r in enumerate(rows)]
        self._videos = videos[order]
        self._where = np.concatenate([np.empty((0, 2), int), *where])[order].astype(np.int32)


def _video_number(path: str) -> int:
    name = os.fsencode(os.path.abspath(path))
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _map(path: str) -> np.ndarray | None:
    """The bytes of a file of the index, shared by all processes; None if it is none."""
    try:
        content = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError):  # gone, or empty
        return None
    head = len(_MAGIC) + 8
    if len(content) < head or content[: len(_MAGIC)].tobytes() != _MAGIC:
        return None
    count = struct.unpack("<q", content[len(_MAGIC) : head].tobytes())[0]
    return content if 0 <= count <= (len(content) - head) // _ROW.itemsize else None


def _rows_of(content: np.ndarray) -> np.ndarray:
    head = len(_MAGIC) + 8
    count = struct.unpack("<q", content[len(_MAGIC) : head].tobytes())[0]
    return content[head : head + count * _ROW.itemsize].view(_ROW)


def _entry_of(content: np.ndarray, row: np.void) -> bytes | None:
    """The entry that a row of a file tells of, if it is as it was written."""
    start, length = int(row["start"]), int(row["length"])
    entry = content[max(start, 0) : start + length].tobytes()
    return entry if len(entry) == length and zlib.crc32(entry) == row["checksum"] else None


def pack(packets: Packets) -> bytes:
    """As bytes; times and places as steps, which compress well."""
    stored = packets.stored
    pts = packets.pts if stored is None else stored.pts
    extradata = b"" if stored is None else stored.extradata
    head = _HEAD.pack(
        packets.fps or 0.0,
        packets.num_frames,
        0 if pts is None else len(pts),
        len(extradata),
        stored is not None,
    )
    parts = [head, extradata]
    if pts is not None:
        parts.append(np.diff(pts, prepend=0).astype("<i8").tobytes())
    if stored is not None:
        ends = stored.places + stored.sizes
        parts.append((stored.places - np.concatenate([[0], ends[:-1]])).astype("<i8").tobytes())
        parts.append(stored.sizes.astype("<i8").tobytes())
        parts.append(stored.kinds.tobytes())
    return zlib.compress(b"".join(parts))


def unpack(entry: bytes) -> Packets:
    """The reverse of `pack`."""
    content = zlib.decompress(entry)
    fps, num_frames, count, extradata_length, has_places = _HEAD.unpack_from(content)
    place = _HEAD.size + extradata_length
    extradata = content[_HEAD.size : place]
    if not count:
        return Packets(num_frames, None, fps or None)
    numbers = np.frombuffer(content, "<i8", count * (3 if has_places else 1), place)
    pts = numbers[:count].cumsum()
    if not has_places:
        return Packets(num_frames, pts, fps or None)
    sizes = numbers[2 * count :]
    places = numbers[count : 2 * count].cumsum() + np.concatenate([[0], sizes[:-1].cumsum()])
    kinds = np.frombuffer(content, np.uint8, count, place + numbers.nbytes)
    stored = StoredPackets(extradata, pts, places, sizes, kinds)
    return Packets(num_frames, np.sort(pts), fps or None, stored)
