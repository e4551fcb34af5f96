"""What goes wrong with data: one line each, for people."""

from __future__ import annotations

from typing import NamedTuple


class DataError(ValueError):
    """A list or annotation file of the wrong form: file, line, what was expected."""


class DecodeError(ValueError):
    """A video that gives no frames: its path and why."""


class TooManyBadVideos(RuntimeError):
    """More videos than allowed would not decode: the list of them."""


class Failure(NamedTuple):
    """A video that would not decode."""

    path: str
    reason: str
