"""How a run ends: one line for people, and an exit code for scripts.

0   done
1   failed: the loss is not finite, too many bad videos, a process was lost, ...
2   bad input: a flag, a config key, a list, a checkpoint; nothing was trained
75  stopped by a signal, and saved: the same command goes on from there
130 stopped by a second Ctrl-C, not saved
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist

from slowfast_lara.config import ConfigError
from slowfast_lara.data import DataError, TooManyBadVideos
from slowfast_lara.engine.checkpoint import CheckpointError
from slowfast_lara.engine.signals import Stopped
from slowfast_lara.models.weight_files import WeightsError

DONE, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130

logger = logging.getLogger(__name__)


class RunError(RuntimeError):
    """A run that cannot go on, with a message for people."""


def exit_code_of(run: Callable[[], None]) -> int:
    """Run, report what ends it, and say with which code to exit."""
    try:
        run()
    except Stopped as stopped:
        complain(str(stopped))
        return STOPPED
    except (ConfigError, DataError, CheckpointError, WeightsError) as error:
        # Every process of a machine sees the same bad input: one of them says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            complain(" ".join(str(error).split()))
        return BAD_INPUT
    except (RunError, TooManyBadVideos, OSError) as error:
        complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        complain("interrupted; nothing was saved since the last checkpoint")
        return INTERRUPTED
    except Exception as error:
        if is_connection_loss(error):
            complain(f"lost another process of this run, so this one ends: {_first_line(error)}")
        else:
            complain(traceback.format_exc())
        return FAILED
    return DONE


def is_connection_loss(error: Exception) -> bool:
    """Whether the others of a run are at fault; gloo raises plain RuntimeErrors."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    signs = ("gloo", "nccl", "connection")
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    )


def complain(message: str) -> None:
    """An error on stderr, and in the log if there is one."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    if logging.root.handlers:
        logger.error(message)


def end_process(code: int) -> None:
    """Leave now: a process group that lost a member may never be torn down."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
