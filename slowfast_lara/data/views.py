"""Test views of a video: all crops of all clips, from frames that are decoded once."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data.transforms import Normalize, test_crop
from slowfast_lara.data.video import ClipFrames


def crop_views(frames: ClipFrames, cfg: CfgNode) -> torch.Tensor:
    """Normalised views, float32 [clips * crops, 3, T, H, W]; `frames.order` must be [clips, T]."""
    data, size = cfg.DATA, cfg.DATA.TEST_CROP_SIZE
    positions = (1,) if cfg.TEST.NUM_SPATIAL_CROPS == 1 else (0, 1, 2)
    normalize = Normalize(data)
    clips, num_frames = frames.order.shape
    views = _buffers.take((clips, len(positions), 3, num_frames, size, size))
    planes = np.empty((3, 1, *frames.pixels.shape[1:3]), np.float32)
    for number, frame in enumerate(frames.pixels):  # normalise once for all clips and crops
        normalize(frame[None], out=planes)
        pixels = planes.transpose(1, 2, 3, 0)
        crops = [test_crop(pixels, position, data)[0] for position in positions]
        for clip, time in np.argwhere(frames.order == number):
            for view, crop in zip(views[clip], crops):
                view[:, time] = crop.transpose(2, 0, 1)
    return torch.from_numpy(views).flatten(0, 1)


class _BufferPool:
    """Pool of arrays for views; the memory of an array is reused once nothing refers to the array.

    The views of a video take hundreds of megabytes. Allocating this memory takes as long as
    filling it, or several times as long on a virtual machine.
    """

    BUFFERS = 2  # one array is filled while the caller uses the other

    def __init__(self) -> None:
        self._buffers = [np.empty(0, np.float32)] * self.BUFFERS
        # Weak references to the arrays in use. A tensor that uses an array keeps it alive.
        self._in_use: list[Callable[[], np.ndarray | None]] = [lambda: None] * self.BUFFERS
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An uninitialised float32 array that is not in use."""
        size = math.prod(shape)
        with self._lock:
            for number in range(self.BUFFERS):
                if self._in_use[number]() is None:
                    if self._buffers[number].size < size:
                        self._buffers[number] = np.empty(size, np.float32)
                    array = self._buffers[number][:size].reshape(shape)
                    self._in_use[number] = weakref.ref(array)
                    return array
        return np.empty(shape, np.float32)


_buffers = _BufferPool()
