"""Writing of checkpoints in the background, while training continues on the GPU.

On a CPU, training waits for each write, because the write needs the same cores. A killed process
loses the iterations since its last complete checkpoint. On GPUs, a write is complete only some
iterations after it started.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Runs one write at a time, in a thread if `background`; errors are raised in the caller."""

    def __init__(self, background: bool) -> None:
        self._executor = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._writing: Future[None] | None = None

    def submit(self, content: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Call `write(content)` now or, in the background, with a copy of the content."""
        self.wait()
        if self._executor is None:
            write(content)
        else:
            self._writing = self._executor.submit(write, copied_to_cpu(content, {}))

    def check(self) -> None:
        """If the last write has ended, raise its error, if any; do not wait for the write."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the write has ended; raise its error."""
        if self._writing is not None:
            wait([self._writing])
            ended, self._writing = self._writing, None
            ended.result()

    def close(self) -> None:
        """Wait until the write has ended; log its error, so as not to hide an error of the run."""
        try:
            self.wait()
        except Exception as error:
            logger.error("%s", error)


def copied_to_cpu(value: Any, copies: dict[Any, Tensor]) -> Any:
    """Copy the tensors in nested containers to the CPU; a tensor that occurs twice is copied once.

    `copies` caches the copies during the recursion; pass {}.
    """
    if isinstance(value, dict):
        return type(value)((key, copied_to_cpu(x, copies)) for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(copied_to_cpu(x, copies) for x in value)
    if not isinstance(value, Tensor):
        return value
    place = value.device, value.dtype, value.data_ptr(), value.shape, value.stride()
    if place not in copies or not value.numel():
        copies[place] = value.detach().to("cpu", copy=True)
    return copies[place]
