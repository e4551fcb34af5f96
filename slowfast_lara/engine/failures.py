"""What ends a process of a run, besides errors that are told as they are."""

from __future__ import annotations

import contextlib
import errno
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

import torch.distributed as dist

from slowfast_lara.errors import RunError, UserError, first_line, killed_worker, no_shared_memory


@contextlib.contextmanager
def plain_reasons() -> Iterator[None]:
    """Say the loss of another process, or of a loader's worker, in words for people."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lost_worker = _loss_of_worker(error)
        if lost_worker:
            raise RunError(lost_worker) from None
        if not is_connection_loss(error):
            raise
        reason = first_line(error)
        raise RunError(f"lost another process of this run, so this one ends: {reason}") from None


def _loss_of_worker(error: Exception) -> str:
    """What to do if a worker died or could not be started; "" for any other error."""
    text = first_line(error)
    # The queues of a loader have their locks in shared memory.
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
        return no_shared_memory(text) if _free_shared_memory() < 2**20 else ""
    if not (isinstance(error, RuntimeError) and "DataLoader worker" in text):
        return ""
    if "Bus error" in text or "shared memory" in text:
        return no_shared_memory(text)
    if "Killed" in text or "exited unexpectedly" in text:
        return killed_worker(text)
    return f"a worker of the loader is gone: {text}"


def _free_shared_memory() -> float:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:  # not on this system
        return math.inf


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
    if threading.current_thread() is threading.main_thread():
        # PyTorch raises an error when a worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
