"""A progress bar on the terminal of rank 0."""

from __future__ import annotations

import sys

from torch import distributed
from tqdm import tqdm


def progress_bar(total: int, description: str, *, unit: str, initial: int = 0) -> tqdm:
    """A bar on the terminal of process 0, and nothing elsewhere."""
    hidden = distributed.is_initialized() and distributed.get_rank() != 0
    return tqdm(
        total=total,
        initial=initial,
        leave=False,
        unit=unit,
        desc=description,
        disable=hidden or not sys.stdout.isatty(),
    )
