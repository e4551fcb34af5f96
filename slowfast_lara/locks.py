"""A folder that one run has for itself."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import socket
from collections.abc import Iterator

from slowfast_lara.errors import InputError
from slowfast_lara.files import make_folder, remove_empty

try:
    import fcntl
except ImportError:  # Windows, where msvcrt does it
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"


class _Taken(Exception):
    """By whom."""


@contextlib.contextmanager
def exclusive_lock(folder: str, name: str, error: type[InputError] = InputError) -> Iterator[None]:
    """Keep other runs out of a folder. If nothing is written meanwhile, it is as it was.

    An `error` that calls it by its `name` if another run has it, or if it cannot be written.
    """
    path = os.path.join(folder, LOCK)
    try:
        made = make_folder(folder)
        lock = _locked(path)
    except _Taken as taken:
        raise error(f"{name} is {folder!r}, where another run is at work: {taken}") from None
    except OSError as reason:
        raise error(
            f"{name} is {folder!r}; a folder that can be written is expected ({reason.strerror})"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)  # while it is locked: see _locked
        os.close(lock)
        if fcntl is None:  # Windows removes no file that is open, which another's would be
            with contextlib.suppress(OSError):
                os.remove(path)
        remove_empty(made)


def _locked(path: str) -> int:
    """The lock file, open, locked for this process, with a line that says whose it is.

    It is a POSIX lock. The system gives it back when the process ends, however it ends, and
    forked workers of a loader do not have it. NFS and CIFS ask the server, so that it holds
    between machines; if a machine dies, NFS 4 gives its locks back after a lease of about 90 s.
    Lustre has such locks where it is mounted with `flock`, and between the processes of one
    machine alone with `localflock`; BeeGFS too has those alone unless it is set up otherwise.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(file)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.read(file, 200).decode(errors="replace")
                os.close(file)
                told = "".join(filter(str.isprintable, holder))
                raise _Taken(told or "another process") from None
            logger.warning(
                "%s cannot be locked (%s): do not start another run in this folder",
                path,
                error.strerror,
            )
        if _is_at(path, file):
            break
        os.close(file)  # its holder removed it between our opening and our locking
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    os.truncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return file


def _lock(file: int) -> None:
    """Lock an open file, or raise an OSError at once."""
    if fcntl is not None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        import msvcrt

        # One byte far behind the text, because Windows lets nobody read what is locked.
        os.lseek(file, 2**30, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(file, 0, os.SEEK_SET)


def _is_at(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False
