"""A small set of videos for the session, and a process left as it was."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
import torch

from .helpers import STARTED, kill_group, write_set


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("videos"), train=16, val=5, test=7)


@pytest.fixture()
def in_process():
    """For tests that call `main` here: it takes over signals and logging."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    root, level, threads = logging.root.handlers, logging.root.level, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.root.handlers, logging.root.level = root, level
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_left_running():
    yield
    while STARTED:
        kill_group(STARTED.pop())
