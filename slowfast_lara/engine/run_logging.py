"""Log file, console log, and the files that record the config and environment of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
import sys
from importlib import metadata
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from typing import Any

import torch
from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.engine.distributed import rank
from slowfast_lara.errors import LINES, ConfigError, close_stdout, printable
from slowfast_lara.files import open_in_place, write_json, write_text
from slowfast_lara.runs.folder import CONFIG, ENVIRONMENT, LOG, TEST_PREFIX

logger = logging.getLogger(__name__)

_OPENCV = ("opencv-python", "opencv-python-headless")
PACKAGES = ("torch", "torchvision", "pyslowfast", "fvcore", "numpy", "av", *_OPENCV)


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, and indents all but the first line of a record."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep=LINES).replace("\n", "\n  ")


_FORMATTER = _PrintableFormatter(
    "[%(asctime)s][%(levelname)s] %(filename)s: %(lineno)d: %(message)s", "%m/%d %H:%M:%S"
)
# Records with these parts are not printed on a terminal, where a progress bar replaces them.
_PROGRESS_RECORDS = ('"_type": "train_iter"', '"split": "test_iter"')


class _Console(logging.StreamHandler):
    """Logs to stdout until the reader of the pipe exits; then the run logs to its file only."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError):
            close_stdout()
        else:
            super().handleError(record)


class _LogFile(logging.FileHandler):
    """Logs to a file; warns once if a record cannot be written."""

    warned = False

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=open_in_place)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.warned:
            self.warned = True
            path, reason = self.baseFilename, error.strerror
            logger.warning("cannot write to %s (%s): the log is incomplete", path, reason)


def set_up_logging() -> None:
    """Log to stdout: INFO and WARNING on rank 0, only WARNING on other ranks.

    ERROR records go only to the log file of rank 0: `print_error` prints errors to stderr. Rank 0
    buffers its records until `open_log`, because a run must not write to OUTPUT_DIR before its
    checks have passed. PySlowFast's `setup_logging` is not used: it writes no file and assumes 8
    processes per node.
    """
    console = _Console(sys.stdout)
    console.addFilter(_show_on_console)
    console.setFormatter(_FORMATTER)
    logging.root.handlers = [console]
    if rank() == 0:
        buffer = MemoryHandler(capacity=100_000, flushLevel=sys.maxsize, flushOnClose=False)
        logging.root.addHandler(buffer)
    logging.root.setLevel(logging.INFO if rank() == 0 else logging.WARNING)


def open_log(output_dir: str) -> None:
    """Log to a file in OUTPUT_DIR, starting with the buffered records."""
    path = os.path.join(output_dir, LOG)
    try:
        file = _LogFile(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    file.setFormatter(_FORMATTER)
    for handler in list(logging.root.handlers):
        if isinstance(handler, MemoryHandler):
            handler.setTarget(file)
            handler.flush()
            logging.root.removeHandler(handler)
    logging.root.addHandler(file)


def _show_on_console(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.ERROR:  # `errors.print_error` prints errors to stderr
        return False
    message = record.getMessage()
    return not (sys.stdout.isatty() and any(part in message for part in _PROGRESS_RECORDS))


def write_records(cfg: CfgNode) -> list[str]:
    """Write config and environment, for training and test separately; return the file names."""
    names = []
    for prefix, enabled in (("", cfg.TRAIN.ENABLE), (TEST_PREFIX, cfg.TEST.ENABLE)):
        if enabled:
            names += [prefix + CONFIG, prefix + ENVIRONMENT]
            write_text(os.path.join(cfg.OUTPUT_DIR, names[-2]), cfg.dump())
            write_json(os.path.join(cfg.OUTPUT_DIR, names[-1]), _environment())
    return names


def _environment() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {
        "slowfast_lara": slowfast_lara.__version__,
        "git_commit": _git_commit(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _git_commit() -> str | None:
    """Return the git commit of this package, with "-dirty" if modified; None if unknown."""
    folder = os.path.dirname(os.path.abspath(slowfast_lara.__file__))
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
