"""What a run leaves beside its results: its log, its config, its surroundings."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch
from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.engine.distributed import rank
from slowfast_lara.engine.run_folder import CONFIG, ENVIRONMENT, LOG
from slowfast_lara.errors import LINES, printable
from slowfast_lara.files import write_json, write_text

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
# Lines that a terminal has a bar for.
_SHOWN_BY_A_BAR = ('"_type": "train_iter"', '"split": "test_iter"')


def set_up_logging(output_dir: str) -> None:
    """Process 0 logs to stdout and to a file in OUTPUT_DIR; the others only warn.

    PySlowFast's `setup_logging` writes no file, and takes every eighth rank for
    the first one.
    """
    form = _PrintableFormatter(
        "[%(asctime)s][%(levelname)s] %(filename)s: %(lineno)d: %(message)s", "%m/%d %H:%M:%S"
    )
    console: logging.Handler = logging.StreamHandler(sys.stdout)
    console.addFilter(_belongs_on_console)
    handlers = [console]
    if rank() == 0:
        handlers.append(logging.FileHandler(os.path.join(output_dir, LOG)))
    for handler in handlers:
        handler.setFormatter(form)
    logging.root.handlers = handlers
    logging.root.setLevel(logging.INFO if rank() == 0 else logging.WARNING)


class _PrintableFormatter(logging.Formatter):
    """No control characters; further lines of a record are indented, as no record is."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep=LINES).replace("\n", "\n  ")


def _belongs_on_console(record: logging.LogRecord) -> bool:
    """Errors go to stderr by themselves (`errors.complain`)."""
    if record.levelno >= logging.ERROR:
        return False
    message = record.getMessage()
    return not (sys.stdout.isatty() and any(part in message for part in _SHOWN_BY_A_BAR))


def write_records(cfg: CfgNode) -> None:
    """Write the config, and the versions and the machine it is run with."""
    write_text(os.path.join(cfg.OUTPUT_DIR, CONFIG), cfg.dump())
    write_json(os.path.join(cfg.OUTPUT_DIR, ENVIRONMENT), _environment())


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
