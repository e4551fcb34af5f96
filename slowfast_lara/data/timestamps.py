"""Frame timestamps of videos, cached in one SQLite file per folder of lists.

Training and validation demux a video once for its timestamps; later epochs, runs and processes read
them from `timestamps.sqlite3`. An entry is valid while its video has the same path, size and
modification time; otherwise the video is demuxed again. A cache file that is corrupt or belongs to
another application is ignored. If the cache file is not writable, new entries stay in memory. The
database uses a rollback journal, because SQLite's write-ahead log does not work on NFS or in
read-only folders.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
import zlib
from contextlib import closing
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

import numpy as np

logger = logging.getLogger(__name__)

FILE_NAME = "timestamps.sqlite3"
_APPLICATION_ID = 0x534C4652  # SQLite header field that identifies our files
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS videos (path BLOB PRIMARY KEY, size INTEGER, mtime_ns INTEGER, "
    "num_frames INTEGER, fps REAL, pts BLOB, key_pts BLOB, checksum INTEGER) WITHOUT ROWID"
)
# New entries are written in batches: after this many videos or seconds, and at process exit.
_BATCH_VIDEOS, _BATCH_SECONDS = 256, 10.0
LOCK_TIMEOUT = 5.0  # seconds
# If the file is not writable, a process keeps up to this many of the latest entries in memory.
_MAX_PENDING = 10_000
# A video modified less than 2 s ago is not cached: a second modification within one tick of the
# file system's clock would not change the modification time.
_SETTLED_NS = 2_000_000_000

FileVersion = tuple[int, int]  # size in bytes, modification time in nanoseconds


def file_version(path: str) -> FileVersion | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns


class Timestamps(NamedTuple):
    """Timestamps of a video's frames, from its packets."""

    num_frames: int
    fps: float | None  # None if neither header nor timestamps give a rate
    # In presentation order; None if the timestamps do not identify the frames.
    pts: np.ndarray | None
    key_pts: np.ndarray  # sorted pts of the packets flagged as key frames


class TimestampCache:
    """Cache of `Timestamps` in `folder`; can be forked or pickled to worker processes.

    Every operation opens a new connection: SQLite connections must not be used after a fork.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._file = os.path.join(self._folder, FILE_NAME)
        self._pending: dict[str, tuple[FileVersion, Timestamps]] = {}
        self._can_read = self._can_write = True
        self._process = 0
        self._last_write = time.monotonic()
        # Query the file before workers start: a problem is then logged once, in the main process.
        self._select("PRAGMA schema_version")

    def get(self, path: str, version: FileVersion | None) -> Timestamps | None:
        """Cached timestamps of this version of a video; None if they are not in the cache."""
        path = os.path.abspath(path)
        if version is None:
            return None
        if path in self._pending and self._pending[path][0] == version:
            return self._pending[path][1]
        query = "SELECT * FROM videos WHERE path = ? AND size = ? AND mtime_ns = ?"
        row = self._select(query, (os.fsencode(path), *version))
        return None if row is None else _from_row(row)

    def put(self, path: str, version: FileVersion | None, timestamps: Timestamps) -> None:
        """Cache timestamps of this version of a video, unless the file has just been modified."""
        if version is None or file_version(path) != version:
            return
        if abs(time.time_ns() - version[1]) < _SETTLED_NS:
            return
        if self._process != os.getpid():
            # After a fork, drop the inherited pending entries: the parent process writes them.
            self._process, self._pending = os.getpid(), {}
            Finalize(None, self.write, exitpriority=0)
        self._pending[os.path.abspath(path)] = (version, timestamps)
        is_due = time.monotonic() - self._last_write > _BATCH_SECONDS
        if is_due or len(self._pending) % _BATCH_VIDEOS == 0:
            self.write()

    def write(self) -> None:
        """Write pending entries to the file, if it is writable."""
        self._last_write = time.monotonic()
        # At process exit, the folder may have been deleted.
        if self._pending and self._can_write and os.path.isdir(self._folder):
            rows = [_to_row(path, *entry) for path, entry in self._pending.items()]
            try:
                with closing(self._connect("rwc")) as connection, connection:
                    # No fsync: a cache may lose entries in a power failure.
                    connection.execute("PRAGMA synchronous = OFF")
                    connection.execute("BEGIN IMMEDIATE")
                    _is_empty(connection)  # raises ValueError if this is not a timestamp cache
                    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    connection.execute(_SCHEMA)
                    connection.executemany(
                        "INSERT OR REPLACE INTO videos VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
                    )
                self._pending = {}
            except (sqlite3.Error, ValueError) as error:
                if not _is_locked(error):
                    self._can_write = False
                    logger.warning("Cannot write the timestamp cache %s: %s", self._file, error)
        for path in list(self._pending)[:-_MAX_PENDING]:
            del self._pending[path]

    def _select(self, query: str, values: tuple = ()) -> tuple | None:
        """First row of a query's result; None if no row matches or the file is unusable."""
        if not self._can_read or not os.path.lexists(self._file):
            return None
        try:
            # Mode "rw" lets SQLite roll back the unfinished transaction of a killed process. If the
            # file is not writable, SQLite opens it read-only.
            with closing(self._connect("rw")) as connection:
                is_empty = _is_empty(connection)
                return None if is_empty else connection.execute(query, values).fetchone()
        except (sqlite3.Error, ValueError) as error:
            if not _is_locked(error):
                self._can_read = self._can_write = False
                logger.warning("Ignoring the timestamp cache %s: %s", self._file, error)
            return None

    def _connect(self, mode: str) -> sqlite3.Connection:
        if os.path.islink(self._file):  # SQLite would follow the link and modify its target
            raise ValueError("is a symbolic link")
        uri = f"{Path(self._file).as_uri()}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=LOCK_TIMEOUT, isolation_level=None)


def _is_locked(error: Exception) -> bool:
    """Whether another process held the lock beyond LOCK_TIMEOUT; a later attempt may succeed."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the database has no tables; raises ValueError if it is not a timestamp cache."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if owner != _APPLICATION_ID and tables:
        raise ValueError("not a timestamp cache")
    return tables == 0


def _to_row(path: str, version: FileVersion, timestamps: Timestamps) -> tuple:
    num_frames, fps, pts, key_pts = timestamps
    blobs = [None if array is None else _pack(array) for array in (pts, key_pts)]
    row = (os.fsencode(path), *version, num_frames, fps, *blobs)
    return (*row, zlib.crc32(repr(row).encode()))


def _from_row(row: tuple) -> Timestamps | None:
    *values, checksum = row
    if zlib.crc32(repr(tuple(values)).encode()) != checksum:
        return None
    num_frames, fps, pts, key_pts = values[3:]
    return Timestamps(num_frames, fps, None if pts is None else _unpack(pts), _unpack(key_pts))


def _pack(pts: np.ndarray) -> bytes:
    """Compress the differences of pts: a few bytes if the frame rate is constant."""
    return zlib.compress(np.diff(pts, prepend=0).astype("<i8").tobytes())


def _unpack(blob: bytes) -> np.ndarray:
    return np.frombuffer(zlib.decompress(blob), "<i8").cumsum()
