"""Progress of long commands: bars (on rank 0, in a terminal) and lines on stderr."""

from __future__ import annotations

import sys

from tqdm import tqdm


class Bar(tqdm):
    """A tqdm bar without a monitor thread: a process that is forked as a thread starts may hang."""

    monitor_interval = 0


def progress_bar(total: int, description: str, *, unit: str, initial: int = 0) -> tqdm:
    """Create a progress bar that is shown only on rank 0 and only if stdout is a terminal."""
    from torch import distributed  # preparing data needs `Bar`, but not PyTorch

    is_other_rank = distributed.is_initialized() and distributed.get_rank() != 0
    disable = is_other_rank or not sys.stdout.isatty()
    return Bar(
        total=total, initial=initial, leave=False, unit=unit, desc=description, disable=disable
    )


def print_progress(text: str) -> None:
    """Print a line on stderr and flush it; stdout is for the results."""
    print(text, file=sys.stderr, flush=True)
