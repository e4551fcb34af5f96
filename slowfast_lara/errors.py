"""User-facing errors and process exit codes.

0    success
1    failure: non-finite loss, too many bad videos, a lost process, ...
2    bad input, found at the start: a flag, a config key, a list, a checkpoint
75   stopped by a signal; the state, if any, is saved, and the same command resumes
130  interrupted without saving, or with partial results (`predict`)
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

DONE, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130

# Control characters that are not escaped in multi-line messages (tables, tracebacks).
LINES = "\n\t"

logger = logging.getLogger(__name__)

# Environment variable with the directory that a launcher shares with the ranks it starts.
LAUNCH_DIR = "SLOWFAST_LARA_LAUNCH_DIR"
# Marker file in this directory: the ranks of this node have completed a rendezvous.
JOINED = "joined"


class UserError(Exception):
    """Base class of errors for which only the message is printed, without a traceback."""

    exit_code = FAILED


class InputError(UserError, ValueError):
    """Unusable flag, file or folder."""

    exit_code = BAD_INPUT


class ConfigError(InputError):
    """Invalid config key or value."""


class DataError(InputError):
    """Unusable list, annotations or class names; the message names file and line, if known."""


class DecodeError(InputError):
    """Unreadable video, image or frame array; for a file, the message starts with its path."""


class WeightsError(InputError):
    """Unusable weights file."""


class CheckpointError(WeightsError):
    """Unusable checkpoint of a training run."""


class RunError(UserError):
    """Failure during a run."""


class ConnectionLost(RunError):
    """Lost connection to another rank; an error of the other rank may be the cause."""


class Stopped(UserError):
    """Graceful stop after a signal; the state, if there is any, is saved."""

    exit_code = STOPPED


def run_with_exit_code(command: Callable[[], int | None], *, os_error: int = BAD_INPUT) -> int:
    """Run a command, print its error, and return the process exit code.

    Args:
        command: returns an exit code, or None for success.
        os_error: the exit code after an OSError.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # On Windows, redirected output uses a legacy code page: escape the characters it lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command() or DONE
    except UserError as error:
        message = str(error)
        if error.exit_code == BAD_INPUT:
            message = " ".join(message.split())
        if _is_printed_by_another_rank(message):
            _log(message)
        else:
            print_error(message)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has exited, as in `| head`
        close_stdout()
        return os_error
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return os_error
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except Exception:
        print_error(traceback.format_exc())
        return FAILED


def close_stdout() -> None:
    """Redirect stdout to /dev/null after its reader has exited, so later prints do not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(message: str) -> None:
    """Print an error to stderr if anybody reads it, and log it if logging is set up.

    If LAUNCH_DIR is set, also write the error to this folder, where the launcher reads it.
    """
    # Ctrl-C also kills the `tee` that reads stderr. A failed print must not keep a process alive.
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {printable(message, keep=LINES)}", file=sys.stderr, flush=True)
    _log(message)
    if folder := os.environ.get(LAUNCH_DIR):
        with contextlib.suppress(OSError):
            Path(folder, f"error-{os.getpid()}").write_text(message, "utf-8", "replace")


def reported_error(launch_dir: str, pid: int | None) -> str:
    """Return one line of the last error of process `pid` or, if it printed none, of any rank.

    If no rank printed an error, return "it printed no error".
    """
    # A rank does not print an error that another rank has already printed.
    for path in (Path(launch_dir, f"error-{pid}"), *Path(launch_dir).glob("error-*")):
        with contextlib.suppress(OSError):
            lines = path.read_text("utf-8").strip().splitlines() or [""]
            return printable(lines[-1 if lines[0].startswith("Traceback") else 0][:200])
    return "it printed no error"


def _log(message: str) -> None:
    if logging.root.handlers:  # otherwise logging would print to stderr again
        logger.error("%s", printable(message, keep=LINES))


def _is_printed_by_another_rank(message: str) -> bool:
    """Whether another rank of this launch on this node has printed this message.

    All ranks may find the same bad input. The first rank to report it creates a marker file in a
    folder that the ranks of the node share: LAUNCH_DIR or, under torchrun, the folder two levels
    above the rank's error file.
    """
    folder = os.environ.get(LAUNCH_DIR)
    if not folder and (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        folder = os.path.dirname(os.path.dirname(error_file))
    if not folder:
        return False
    digest = hashlib.sha256(message.encode(errors="replace")).hexdigest()[:16]
    try:
        Path(folder, f"printed-{digest}").touch(exist_ok=False)
    except OSError as error:
        return isinstance(error, FileExistsError)
    return False


def no_shared_memory(reason: str) -> str:
    """Error message for DataLoader workers that run out of shared memory."""
    return (
        "no space left in /dev/shm, the shared memory of DataLoader workers: "
        "enlarge it (docker run --shm-size=8g), or lower DATA_LOADER.NUM_WORKERS (0 needs none), "
        f"TRAIN.BATCH_SIZE or, in a test, TEST.NUM_ENSEMBLE_VIEWS ({reason})"
    )


def printable(text: str, keep: str = "") -> str:
    """Escape the characters that `str.isprintable` rejects, except those in `keep`.

    File names can contain terminal escape sequences, newlines that forge log lines, and bytes
    that are not valid UTF-8.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 video", "2 videos", "3 classes"."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def first_line(error: BaseException) -> str:
    """First line of an exception's message, up to 200 characters; if it is empty, its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
