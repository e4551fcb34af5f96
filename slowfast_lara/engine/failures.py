"""What ends a process of a run, besides errors that are told as they are."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator

import torch.distributed as dist

from slowfast_lara.errors import Interrupted, RunError, UserError, first_line


@contextlib.contextmanager
def plain_reasons() -> Iterator[None]:
    """Say an interrupt, and the loss of another process, in words for people."""
    try:
        yield
    except UserError:
        raise
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was saved since the last checkpoint") from None
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
    """Leave now: a process group that lost a member may never be torn down."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
