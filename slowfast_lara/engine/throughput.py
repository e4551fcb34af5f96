"""Throughput of training: clips per second and, on GPUs, model FLOPs utilisation (MFU)."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch._subclasses.fake_tensor import FakeTensorMode

from slowfast_lara.config.load import with_overrides
from slowfast_lara.models import MODEL_REGISTRY
from slowfast_lara.models.build import device_of
from slowfast_lara.models.numerics import autocast_dtype

# Peak TFLOP/s in half precision on tensor cores, without sparsity, from NVIDIA's data sheets.
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A40": 150,
    "A10": 125,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "V100": 125,
    "T4": 65,
}


class Throughput:
    """Clips per second and MFU of one process, computed from the seconds per batch."""

    def __init__(self, cfg: CfgNode, batch_size: int) -> None:
        self._batch_size = batch_size
        self._peak_share = 0.0  # seconds per clip at peak FLOP/s; 0 if unknown
        device = device_of(cfg)
        if device.type == "cuda" and autocast_dtype(cfg, device):
            peak = peak_flops(torch.cuda.get_device_name(device))
            self._peak_share = training_flops(cfg) / peak if peak else 0.0

    def stats(self, seconds: float) -> dict[str, float]:
        """Return the log values `clips_per_s` and, unless it is unknown, `mfu` in percent."""
        rate = self._batch_size / seconds if seconds else 0.0
        mfu = {"mfu": 100 * rate * self._peak_share} if self._peak_share else {}
        return {"clips_per_s": rate, **mfu}


def peak_flops(gpu: str) -> float:
    """Peak FLOP/s of a GPU with this name; 0 if it is not in PEAK_TFLOPS."""
    found = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", gpu))
    return next(found, 0) * 1e12


def training_flops(cfg: CfgNode) -> int:
    """FLOPs of a training step per clip: three times those of the forward pass; 0 if unknown.

    As usual for MFU, only matmuls, convolutions and attentions are counted, without the
    recomputation of activation checkpointing.
    """
    try:
        torch_only = with_overrides(cfg, ["VIT.KERNELS", "torch"])
        one, two = (_forward_flops(with_overrides(torch_only, ["VIT.DEPTH", n])) for n in (1, 2))
    except RuntimeError:  # a user's estimator may read values, which fake tensors do not have
        return 0
    return 3 * (one + (cfg.VIT.DEPTH - 1) * (two - one))


def _forward_flops(cfg: CfgNode) -> int:
    """FLOPs of the forward pass of one clip, counted on fake tensors on the CPU.

    A count on the GPU would be too high: there, some estimators do redundant work to launch fewer
    kernels.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, which is slow

    frames, size = [cfg.DATA.NUM_FRAMES] * cfg.VIT.VIDEO_INPUT, cfg.DATA.TRAIN_CROP_SIZE
    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    with FakeTensorMode(), torch.no_grad():
        model = MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg)
        with FlopCounterMode(display=False, custom_mapping=attention) as counter:
            model([torch.empty(1, cfg.VIT.CHANNELS, *frames, size, size)])
    return counter.get_total_flops()


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
