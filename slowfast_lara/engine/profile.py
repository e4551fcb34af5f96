"""Profiling of training steps: a trace for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import logging
import os

import torch
from fvcore.common.config import CfgNode
from torch.profiler import ProfilerActivity, profile

from slowfast_lara.engine.distributed import rank
from slowfast_lara.files import atomic_write

logger = logging.getLogger(__name__)


class StepProfiler:
    """On rank 0, profiles batches TRAIN.PROFILE [first, last], counted from 1 in this process."""

    def __init__(self, cfg: CfgNode) -> None:
        batches: list[int] = cfg.TRAIN.PROFILE or [0, 0]
        self._first, self._last = batches
        self._path = os.path.join(cfg.OUTPUT_DIR, f"trace_{self._first}_{self._last}.json")
        self._batch = 0
        self._profile: profile | None = None

    def start_batch(self) -> None:
        """Count a batch and start or stop the profiler accordingly; call this before each batch."""
        self._batch += 1
        if self._batch == self._first and rank() == 0:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profile.start()
        elif self._batch > self._last:
            self.close()

    def close(self) -> None:
        """If the profiler is running, stop it and write the trace."""
        if self._profile is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else the trace would lack kernels that are still queued
        finished, self._profile = self._profile, None
        finished.stop()
        with atomic_write(self._path) as temporary:
            finished.export_chrome_trace(temporary)
        logger.info("Wrote the profile of training batches to %s", self._path)
