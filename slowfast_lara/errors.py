"""What a person can mend, and how a command ends.

0    done
1    failed: the loss is not finite, too many bad videos, a process was lost, ...
2    bad input, seen at the start: a flag, a config key, a list, a checkpoint
75   stopped by a signal, and saved: the same command goes on from there
130  interrupted: not saved (a run), or only what was done (`predict`)
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

DONE, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130

# What texts of several lines are made of: a table, a traceback.
LINES = "\n\t"

logger = logging.getLogger(__name__)

# Where a launcher names the folder that it has for the processes it starts.
LAUNCHERS_FOLDER = "SLOWFAST_LARA_LAUNCHERS_FOLDER"


class UserError(Exception):
    """One line for people: what was wrong, where, and what is allowed."""

    exit_code = FAILED


class InputError(UserError, ValueError):
    """Something given that cannot be used: a flag, a file, a folder."""

    exit_code = BAD_INPUT


class ConfigError(InputError):
    """A config that cannot be run: key, value and what is allowed."""


class DataError(InputError):
    """A list or annotation file of the wrong form: file, line, what was expected."""


class DecodeError(InputError):
    """A video that gives no frames: its path and why."""


class WeightsError(InputError):
    """A file of weights that cannot be used: the file and the reason."""


class CheckpointError(WeightsError):
    """A checkpoint of ours that cannot be used."""


class RunError(UserError):
    """A run that cannot go on."""


class TooManyBadVideos(RunError):
    """More videos than allowed would not decode: the list of them."""


class Stopped(UserError):
    """A signal was obeyed: the state is saved as far as there is one to save."""

    exit_code = STOPPED


class Interrupted(UserError):
    """A second Ctrl-C: ended at once."""

    exit_code = INTERRUPTED


def exit_code_of(command: Callable[[], int | None], *, os_error: int = BAD_INPUT) -> int:
    """Run a command, say in one line what ends it, and return the code to exit with.

    `os_error` is the code for a file that cannot be read or written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Redirected on Windows, it knows few characters; it escapes the others, as stderr does.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command() or DONE
    except UserError as error:
        message = str(error)
        if error.exit_code == BAD_INPUT:
            message = " ".join(message.split())
        if _said_by_another(message):
            _log(message)
        else:
            print_error(message)
        return error.exit_code
    except BrokenPipeError:  # `| head` has seen enough
        close_stdout()
        return BAD_INPUT
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
    """Nobody reads it any more: what is still printed goes nowhere, instead of failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_error(message: str) -> None:
    """An error on stderr, and in the log if there is one."""
    print(f"error: {printable(message, keep=LINES)}", file=sys.stderr, flush=True)
    _log(message)


def _log(message: str) -> None:
    if logging.root.handlers:  # without one, Python would print it on stderr
        logger.error("%s", printable(message, keep=LINES))


def _said_by_another(message: str) -> bool:
    """Whether another process that the same launcher has started has said the same.

    All of them see the same bad input. The first to come leaves a mark, an empty file, in a
    folder that no other user can write to: ours, or the one that torchrun makes for each
    attempt, in which each process has a folder for the file of its error.
    """
    folder = os.environ.get(LAUNCHERS_FOLDER)
    of_torchrun = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not folder and of_torchrun:
        folder = os.path.dirname(os.path.dirname(of_torchrun))
    if not folder:
        return False
    digest = hashlib.sha256(message.encode(errors="replace")).hexdigest()[:16]
    try:
        Path(folder, f"said-{digest}").touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def no_shared_memory(reason: str) -> str:
    """What to do if the workers of a loader cannot hand over their batches."""
    return (
        f"no room in the shared memory /dev/shm, by which the workers of a loader hand over "
        f"their batches: give it more (docker run --shm-size=8g), or lower "
        f"DATA_LOADER.NUM_WORKERS (0 needs none), TRAIN.BATCH_SIZE or, in a test, "
        f"TEST.NUM_ENSEMBLE_VIEWS ({reason})"
    )


def printable(text: str, keep: str = "") -> str:
    """Text with its control characters as \\x1b and the like, except those to `keep`.

    Names of files may hold codes that recolour a terminal, move its cursor or feign lines
    of a log, and bytes that no encoding can print.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def first_line(error: BaseException) -> str:
    """What an error of a library says, cut to one line."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
