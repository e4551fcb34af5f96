"""What a run leaves beside its results: its log, its config, its surroundings."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from importlib import metadata
from logging.handlers import MemoryHandler
from typing import Any

import torch
from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.engine.distributed import rank
from slowfast_lara.errors import LINES, close_stdout, printable
from slowfast_lara.files import write_json, write_text
from slowfast_lara.runs.folder import CONFIG, ENVIRONMENT, LOG, TEST_PREFIX

logger = logging.getLogger(__name__)

PACKAGES = (
    "torch",
    "torchvision",
    "pyslowfast",
    "fvcore",
    "numpy",
    "av",
    "opencv-python",
    "opencv-python-headless",
)


class _PrintableFormatter(logging.Formatter):
    """No control characters; further lines of a record are indented, as no record is."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep=LINES).replace("\n", "\n  ")


_FORM = _PrintableFormatter(
    "[%(asctime)s][%(levelname)s] %(filename)s: %(lineno)d: %(message)s", "%m/%d %H:%M:%S"
)
# Lines that a terminal has a bar for.
_SHOWN_BY_A_BAR = ('"_type": "train_iter"', '"split": "test_iter"')


class _Console(logging.StreamHandler):
    """Lines on stdout, until nobody reads them: `run | head` goes on, into its log."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            close_stdout()
        else:
            super().handleError(record)


class _LogFile(logging.FileHandler):
    """Lines in a file. If one cannot be written, a warning says so once, on the console."""

    told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.told:
            self.told = True
            lost = "lines are lost while it cannot be written"
            logger.warning("%s: %s: %s", self.baseFilename, lost, error.strerror)


def set_up_logging() -> None:
    """Process 0 logs to stdout, and keeps its lines for the file of `open_log`; others only warn.

    PySlowFast's `setup_logging` writes no file, and takes every eighth rank for
    the first one.
    """
    console = _Console(sys.stdout)
    console.addFilter(_belongs_on_console)
    console.setFormatter(_FORM)
    logging.root.handlers = [console, *([_until_checked()] if rank() == 0 else [])]
    logging.root.setLevel(logging.INFO if rank() == 0 else logging.WARNING)


def _until_checked() -> MemoryHandler:
    """Lines of a run whose checks have not passed, which may not write into OUTPUT_DIR yet."""
    return MemoryHandler(capacity=100_000, flushLevel=sys.maxsize, flushOnClose=False)


def open_log(output_dir: str) -> None:
    """Write the lines of process 0 to a file, those that were kept first."""
    file = _LogFile(os.path.join(output_dir, LOG), encoding="utf-8")
    file.setFormatter(_FORM)
    for handler in list(logging.root.handlers):
        if isinstance(handler, MemoryHandler):
            handler.setTarget(file)
            handler.flush()
            logging.root.removeHandler(handler)
    logging.root.addHandler(file)


def _belongs_on_console(record: logging.LogRecord) -> bool:
    """Errors go to stderr by themselves (`errors.print_error`)."""
    if record.levelno >= logging.ERROR:
        return False
    message = record.getMessage()
    return not (sys.stdout.isatty() and any(part in message for part in _SHOWN_BY_A_BAR))


def write_records(cfg: CfgNode) -> list[str]:
    """Write the config, and the versions and the machine it is run with; the files' names.

    A training and a test have their own: a later test leaves the training's as they are, which
    the weights were made with.
    """
    names = []
    for prefix, enabled in (("", cfg.TRAIN.ENABLE), (TEST_PREFIX, cfg.TEST.ENABLE)):
        if enabled:
            names += [prefix + CONFIG, prefix + ENVIRONMENT]
            write_text(os.path.join(cfg.OUTPUT_DIR, names[-2]), cfg.dump())
            write_json(os.path.join(cfg.OUTPUT_DIR, names[-1]), _environment())
    return names


def _environment() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "slowfast_lara": slowfast_lara.__version__,
        "git_commit": _git_commit(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES if _version(name)},
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The checkout's commit, with "-dirty" if files differ from it."""
    folder = os.path.dirname(os.path.abspath(slowfast_lara.__file__))
    command = [
        "git",
        "-C",
        folder,
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude",
        "*",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
