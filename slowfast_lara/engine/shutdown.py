"""What ends a process of a run, besides errors that are told as they are."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator

import torch.distributed as dist

from slowfast_lara.errors import RunError, UserError, first_line, no_shared_memory


@contextlib.contextmanager
def friendly_errors() -> Iterator[None]:
    """Say the loss of another process, or the lack of shared memory, in words for people."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _is_lack_of_shared_memory(error):
            raise RunError(no_shared_memory(first_line(error))) from None
        if not is_connection_loss(error):
            raise
        reason = first_line(error)
        raise RunError(f"lost another process of this run, so this one ends: {reason}") from None


def _is_lack_of_shared_memory(error: Exception) -> bool:
    """Whether the queues of a loader, whose locks are in shared memory, found no room there."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC or error.filename:
        return False
    try:
        return shutil.disk_usage("/dev/shm").free < 2**20
    except OSError:  # not on this system
        return False


def is_connection_loss(error: Exception) -> bool:
    """Whether the others of a run are at fault; gloo raises plain RuntimeErrors."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    signs = ("gloo", "nccl", "connection")
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    )


def end_process(code: int) -> None:
    """Leave now, with all child processes.

    A process group that lost a member may never be torn down, and Python would wait for
    the workers of a loader, which heed no signal (see `signals`).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
