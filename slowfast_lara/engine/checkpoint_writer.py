"""Writing of checkpoints in the background, while the training continues on the GPU.

On a CPU, training waits for each write, because the write needs the same cores. If the process is
killed, at most TRAIN.CHECKPOINT_ITERATIONS iterations are lost. On GPUs, a kill during a write also
loses the iterations that ran during the write.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Runs one write at a time, in a thread if `background`; errors are raised in the caller."""

    def __init__(self, background: bool) -> None:
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, content: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Call `write(content)` now or, in the background, with a copy of the content."""
        self.wait()
        if self._background:
            arguments = write, copied_to_cpu(content, {})
            self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint")
            self._thread.start()
        else:
            write(content)

    def check(self) -> None:
        """If the last write has already failed, raise its error; do not wait for the write."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until the write has ended; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until the write has ended; log its error: the run may be raising another error."""
        try:
            self.wait()
        except Exception as error:
            logger.error("%s", error)

    def _run(self, write: Callable[[dict[str, Any]], None], content: dict[str, Any]) -> None:
        try:
            write(content)
        except Exception as error:
            self._error = error


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
