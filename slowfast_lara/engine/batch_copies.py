"""Copies of batches to the device of the model."""

from __future__ import annotations

import functools

import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from slowfast_lara.data.loader import Batch
from slowfast_lara.data.transforms import Normalize
from slowfast_lara.inference.scoring import to_device


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The copy stream of a device, shared by all BatchCopies.

    PyTorch reuses memory that is freed in a stream only in this stream.
    """
    return torch.cuda.Stream(device)


class BatchCopies:
    """Copies the clips and labels of batches to a device, and normalises raw pixels there.

    On CUDA, copy and normalisation run on a side stream. The host queues work ahead of the device,
    so the copy of a batch runs while the device still computes the previous step.
    """

    def __init__(self, cfg: CfgNode, device: torch.device) -> None:
        self._device = device
        self._normalize = Normalize(cfg.DATA)
        self._stream = _copy_stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Return the normalised clips and the labels on the device."""
        if self._stream is None:
            return self._copy(batch)
        with torch.cuda.stream(self._stream):
            clips, labels = self._copy(batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in (*clips, labels):
            tensor.record_stream(current)  # do not reuse its memory before `current` has read it
        return clips, labels

    def _copy(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        clips = [to_device(clip, self._device) for clip in batch.clips]
        clips = [self._normalize.batch(x) if x.dtype == torch.uint8 else x for x in clips]
        return clips, to_device(batch.labels, self._device)
