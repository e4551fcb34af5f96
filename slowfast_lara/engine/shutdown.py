"""Immediate exit of a process; one-line errors for lost peers and full shared memory."""

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
    """Convert errors due to a lost peer or full shared memory to a RunError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _is_full_shared_memory(error):
            raise RunError(no_shared_memory(first_line(error))) from None
        if is_connection_loss(error):
            raise RunError(f"lost connection to another rank: {first_line(error)}") from None
        raise


def _is_full_shared_memory(error: Exception) -> bool:
    """Whether shared memory has no space left for the locks of a DataLoader's queues."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC or error.filename:
        return False
    try:
        return shutil.disk_usage("/dev/shm").free < 2**20
    except OSError:  # this platform has no /dev/shm
        return False


def is_connection_loss(error: Exception) -> bool:
    """Whether a peer was lost; the message is searched because gloo raises plain RuntimeErrors."""
    if not dist.is_initialized() or not isinstance(error, RuntimeError):
        return False
    words = ("gloo", "nccl", "connection")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def end_process(code: int) -> None:
    """Kill all child processes and exit immediately.

    A regular exit could hang in the teardown of a process group that has lost a rank. It would
    also wait for DataLoader workers, which ignore signals (see `signals`).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
