"""The pixels of a test's views: all crops of all clips, from the frames of one decode."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch
from fvcore.common.config import CfgNode

from slowfast_lara.data.decode import Frames
from slowfast_lara.data.transforms import Normalize, uniform_crop


def crop_views(frames: Frames, cfg: CfgNode) -> torch.Tensor:
    """float32 [clips * crops, 3, T, H, W] of `frames`, whose order is [clips, T]."""
    data, size = cfg.DATA, cfg.DATA.TEST_CROP_SIZE
    positions = (1,) if cfg.TEST.NUM_SPATIAL_CROPS == 1 else (0, 1, 2)
    normalize = Normalize(data.MEAN, data.STD, data.REVERSE_INPUT_CHANNEL)
    clips, num_frames = frames.order.shape
    views = _memory.take((clips, len(positions), 3, num_frames, size, size))
    planes = np.empty((3, 1, *frames.pixels.shape[1:3]), np.float32)
    for number, frame in enumerate(frames.pixels):  # once each, though clips and crops overlap
        normalize(frame[None], out=planes)
        pixels = planes.transpose(1, 2, 3, 0)
        crops = [uniform_crop(pixels, size, position)[0] for position in positions]
        for clip, time in np.argwhere(frames.order == number):
            for view, crop in zip(views[clip], crops):
                view[:, time] = crop.transpose(2, 0, 1)
    return torch.from_numpy(views).flatten(0, 1)


class _Memory:
    """Memory of earlier results that nobody holds any more.

    The views of a video are hundreds of megabytes. To get so much from the system
    takes as long as to fill it, and several times that on a virtual machine.
    """

    # While the caller works on one result, the next one is made.
    BLOCKS = 2

    def __init__(self) -> None:
        self._blocks = [np.empty(0, np.float32)] * self.BLOCKS
        # Weak references to the arrays lent out: alive as long as a tensor on them is.
        self._lent: list[Callable[[], np.ndarray | None]] = [lambda: None] * self.BLOCKS
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array that nobody else uses."""
        size = math.prod(shape)
        with self._lock:
            for number in range(self.BLOCKS):
                if self._lent[number]() is not None:
                    continue
                if self._blocks[number].size < size:
                    self._blocks[number] = np.empty(size, np.float32)
                array = self._blocks[number][:size].reshape(shape)
                self._lent[number] = weakref.ref(array)
                return array
        return np.empty(shape, np.float32)


_memory = _Memory()
