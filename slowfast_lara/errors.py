"""What a person can mend, and how a command ends.

0    done
1    failed: the loss is not finite, too many bad videos, a process was lost, ...
2    bad input: a flag, a config key, a list, a checkpoint; nothing was trained
75   stopped by a signal, and saved: the same command goes on from there
130  interrupted, not saved
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

DONE, FAILED, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130

# What texts of several lines are made of: a table, a traceback.
LINES = "\n\t"

logger = logging.getLogger(__name__)


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
    try:
        return command() or DONE
    except UserError as error:
        # Every process of a machine sees the same bad input: one of them says so.
        if error.exit_code != BAD_INPUT:
            complain(str(error))
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            complain(" ".join(str(error).split()))
        return error.exit_code
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BAD_INPUT
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return os_error
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except Exception:
        complain(traceback.format_exc())
        return FAILED


def complain(message: str) -> None:
    """An error on stderr, and in the log if there is one."""
    print(f"error: {printable(message, keep=LINES)}", file=sys.stderr, flush=True)
    if logging.root.handlers:
        logger.error(message)


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
