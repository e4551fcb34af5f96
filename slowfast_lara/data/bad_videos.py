"""Logging and limiting of training videos that do not decode."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from slowfast_lara.errors import RunError, printable

logger = logging.getLogger(__name__)

# Number of bad videos that any dataset may have, unless max_share is 0. In a small dataset, the
# default max_share of 1 % would be less than one video.
ALWAYS_ALLOWED = 5


class Failure(NamedTuple):
    """A video that does not decode or has non-finite scores, and the reason."""

    path: str
    reason: str


class BadVideos:
    """Logs each bad video once; raises if there are too many.

    Up to ALWAYS_ALLOWED bad videos are allowed, or the fraction `max_share` of all videos if that
    is more. With `max_share` 0, no bad video is allowed.
    """

    def __init__(self, num_videos: int, max_share: float) -> None:
        self._num_videos = num_videos
        self._max_share = max_share
        self._allowed = max(max_share * num_videos, ALWAYS_ALLOWED) if max_share else 0
        self.reasons: dict[str, str] = {}

    def add(self, failures: Iterable[Failure]) -> None:
        before = len(self.reasons)
        for failure in failures:
            if failure.path not in self.reasons:
                self.reasons[failure.path] = failure.reason
                logger.warning("Replacing a video that does not decode: %s: %s", *failure)
        bad = len(self.reasons)
        if bad > before and bad > self._allowed:
            lines = (f"\n  {printable(f'{path}: {why}')}" for path, why in self.reasons.items())
            raise RunError(
                f"{bad} of {self._num_videos} videos do not decode, more than DATA.MAX_BAD_SHARE "
                f"({self._max_share:g}) allows; increase it, or remove the videos from the lists "
                f"with `slowfast-lara data check` and `data drop-bad`. The videos:{''.join(lines)}"
            )
