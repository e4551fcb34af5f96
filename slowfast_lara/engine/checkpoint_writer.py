"""Writing of checkpoints in the background, while training continues on the GPU.

Without CUDA, training waits for each write; on a CPU, the write needs the same cores. A killed
process loses the iterations since its last complete checkpoint. With CUDA, a write is complete only
some iterations after it started.
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
        """Wait for the last write; then call `write(content)`.

        In the background, `write` gets a copy of the content.
        """
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
        """Wait until the last write has ended; raise its error, if any."""
        if self._writing is not None:
            wait([self._writing])
            ended, self._writing = self._writing, None
            ended.result()

    def close(self) -> None:
        """Wait until the last write has ended; log its error instead of raising it.

        Raising it could hide an error of the run.
        """
        try:
            self.wait()
        except Exception as error:
            logger.warning("%s", error)


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
