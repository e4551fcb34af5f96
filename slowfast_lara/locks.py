"""Exclusive lock of a folder, held by one process."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import socket
from collections.abc import Iterator

from slowfast_lara.errors import InputError, printable
from slowfast_lara.files import make_folder, open_in_place, remove_empty

try:
    import fcntl
except ImportError:  # Windows: msvcrt instead
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"


@contextlib.contextmanager
def exclusive_lock(folder: str, name: str, error: type[InputError] = InputError) -> Iterator[None]:
    """Hold the exclusive lock of a folder within the context.

    Args:
        folder: created if missing, with its parents. New folders that stay empty are removed again.
        name: the config key or argument that error messages use for the folder.
        error: raised if another process holds the lock or the folder is not writable.
    """
    path = os.path.join(folder, LOCK)
    try:
        created = make_folder(folder)
        lock = _acquire(path)
    except BlockingIOError as held:
        raise error(f"{name} is {folder!r}, in use by another run: {held}") from None
    except OSError as reason:
        where = f"{LOCK} " if reason.filename == path else ""
        raise error(
            f"{name} is {folder!r}; must be a writable folder ({where}{reason.strerror})"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # Remove the file while it is locked: after the release, another process may lock it.
            os.remove(path)
        os.close(lock)
        if fcntl is None:  # Windows cannot remove open files
            with contextlib.suppress(OSError):
                os.remove(path)
        remove_empty(created)


def _acquire(path: str) -> int:
    """Open and lock the lock file; if already locked, raise BlockingIOError with the holder.

    If the file system does not support locks, log a warning and continue without a lock.

    The system releases a POSIX lock when its process ends, and forked DataLoader workers do not
    inherit the lock. Locks work across nodes on NFS and CIFS, on Lustre if mounted with `flock`,
    and on BeeGFS if locks are enabled. NFS 4 releases the locks of a dead node after about 90 s.
    """
    while True:
        file = open_in_place(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(file)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.read(file, 200).decode(errors="replace").strip()
                os.close(file)
                raise BlockingIOError(printable(holder) or "another process") from None
            warning = "%s cannot be locked (%s): do not start another run in this folder"
            logger.warning(warning, path, error.strerror)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file)):
                break
        os.close(file)  # retry: the previous holder removed the file after we opened it
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    os.truncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return file


def _lock(file: int) -> None:
    """Lock an open file without blocking; raise OSError if another process holds the lock."""
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    # Lock one byte far beyond the text: on Windows, other processes cannot read locked bytes.
    os.lseek(file, 2**30, os.SEEK_SET)
    try:
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    finally:
        os.lseek(file, 0, os.SEEK_SET)
