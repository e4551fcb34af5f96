"""Immediate exit of a process; one-line errors for lost peers, NCCL, and exhausted memory."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from slowfast_lara.errors import ConnectionLost, RunError, UserError, first_line, no_shared_memory


@contextlib.contextmanager
def friendly_errors() -> Iterator[None]:
    """Convert some errors to a RunError of one line.

    These are lost connections to other ranks, errors of NCCL, exhausted GPU or shared memory, and
    operators that are not deterministic.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _is_full_shared_memory(error):
            raise RunError(no_shared_memory(first_line(error))) from None
        if isinstance(error, torch.OutOfMemoryError):
            raise RunError(_out_of_memory(error)) from None
        if "does not have a deterministic implementation" in str(error):
            operator = str(error).split()[0]
            raise RunError(
                f"DETERMINISTIC is True, but {operator} is not deterministic on this device: set "
                "DETERMINISTIC False or, for upsample_bicubic2d, set VIT.POS_CROP_SIZE to the "
                "value of DATA.TRAIN_CROP_SIZE"
            ) from None
        if reason := _nccl_error(str(error)):
            raise RunError(f"NCCL failed on this rank: {reason}") from None
        if is_connection_loss(error):
            reason = first_line(error)
            raise ConnectionLost(f"lost connection to another rank: {reason}") from None
        raise


def _is_full_shared_memory(error: Exception) -> bool:
    """Whether `error` means that /dev/shm has no space for the locks of a DataLoader's queues."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC or error.filename:
        return False
    try:
        return shutil.disk_usage("/dev/shm").free < 2**20
    except OSError:  # this platform has no /dev/shm
        return False


def _out_of_memory(error: torch.OutOfMemoryError) -> str:
    """Error message with advice and, from PyTorch's message, the sentences with memory sizes."""
    sentences = " ".join(str(error).split()).split(". ")
    details = "; ".join(x for x in sentences if re.search(r"\d [KMGT]?i?B", x))
    return (
        "out of GPU memory: lower TRAIN.BATCH_SIZE (and raise SOLVER.ACCUMULATE_STEPS, to keep the "
        "effective batch) or, in a test, TEST.BATCH_SIZE, or set MODEL.ACT_CHECKPOINT True "
        f"({details or first_line(error)})"
    )


def _nccl_error(message: str) -> str:
    """Extract NCCL's result code and last error from an error message of PyTorch.

    The message has a line `ncclSystemError: ...` and, after a line `Last error:`, the cause.
    Returns "" if there is no result code, or if it means a lost peer.
    """
    code = re.search(r"^(nccl\w+): *(.*)", message, re.MULTILINE)
    if not code or code[1] == "ncclRemoteError":  # a peer has exited, or the network failed
        return ""
    last = message.partition("Last error:")[2].split("Exception raised from")[0]
    return f"{code[1]}: {' '.join(last.split()) or code[2]}"


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
