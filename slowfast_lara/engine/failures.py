"""What ends a process of a run, besides errors that are told as they are."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator

import torch.distributed as dist

from slowfast_lara.errors import RunError, UserError, first_line


@contextlib.contextmanager
def plain_reasons() -> Iterator[None]:
    """Say the loss of another process in words for people."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_connection_loss(error):
            raise
        reason = first_line(error)
        raise RunError(f"lost another process of this run, so this one ends: {reason}") from None


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
