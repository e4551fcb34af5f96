"""Logging and limiting of training videos that do not decode."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from slowfast_lara.errors import TooManyBadVideos, printable

logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """A video that does not decode, and why."""

    path: str
    reason: str


class BadVideos:
    """Logs each bad video once; raises if the share of bad videos exceeds `max_share`."""

    def __init__(self, num_videos: int, max_share: float) -> None:
        self._num_videos = num_videos
        self._max_share = max_share
        self.reasons: dict[str, str] = {}

    def add(self, failures: Iterable[Failure]) -> None:
        before = len(self.reasons)
        for failure in failures:
            if failure.path not in self.reasons:
                self.reasons[failure.path] = failure.reason
                logger.warning("Replacing a video that does not decode: %s: %s", *failure)
        bad = len(self.reasons)
        if bad > before and bad > self._max_share * self._num_videos:
            lines = (f"\n  {printable(f'{path}: {why}')}" for path, why in self.reasons.items())
            raise TooManyBadVideos(
                f"{bad} of {self._num_videos} videos do not decode, more than "
                f"DATA.MAX_BAD_SHARE ({self._max_share:g}) allows:{''.join(lines)}"
            )
