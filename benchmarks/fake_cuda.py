"""A fake CUDA device, and the launches and saved bytes of a training step on it.

    LD_PRELOAD=LIBRARY PYTHONPATH=CHECKOUT python -P fake_cuda.py CLIPS CONFIG:KERNELS ...

Fake tensors have shapes, strides and a device, but no data. With fake tensors, a model takes the
code paths of a GPU, including autocast. `build_library` compiles LIBRARY, which must be preloaded,
because PyTorch looks for devices only once. `patch_torch` changes torch globally, so use a separate
process.

To count a step of another checkout, this file is run by its path with that checkout's packages. It
uses only names that exist in both old and new checkouts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_counts import count_kernels
from slowfast_lara.config import load_config
from slowfast_lara.engine.metrics import classification_loss, count_correct
from slowfast_lara.engine.optimizer import build_optimizer, scales_loss, set_lr, step_if_finite
from slowfast_lara.inference.scoring import autocast
from slowfast_lara.labels import label_kind
from slowfast_lara.models import build_model
from slowfast_lara.models.build import device_of


def build_library(path: str) -> None:
    """Compile the library of the fake device; needs g++."""
    from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_cuda.cpp")
    paths = [f"-I{folder}" for folder in include_paths()]
    paths += [f"-L{TORCH_LIB_PATH}", f"-Wl,-rpath,{TORCH_LIB_PATH}"]
    command = ["g++", "-shared", "-fPIC", "-std=c++20", *paths, source, "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, "-o", path], check=True)


def patch_torch() -> None:
    """Make PyTorch take the fake device for a GPU of compute capability 8.0."""
    replacements: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": True,
            "current_device": 0,
            "device_count": 1,
            "get_device_capability": (8, 0),
            "get_device_name": "fake",
            "is_bf16_supported": True,
            "is_current_stream_capturing": False,
            "_lazy_init": None,
            # torch.compile calls the functions below.
            "get_device_properties": SimpleNamespace(major=8, minor=0),
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": None,
        },
        torch._C: {"_cuda_getDevice": 0, "_cuda_exchangeDevice": 0, "_cuda_maybeExchangeDevice": 0},
        torch.cuda.amp.common: {"amp_definitely_not_available": False},
    }
    for module, functions in replacements.items():
        for name, result in functions.items():
            setattr(module, name, lambda *args, result=result, **kwargs: result)
    # PyTorch's own `_apply` cannot convert fake tensors.
    nn.Module._apply = convert  # type: ignore[method-assign]


def convert(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Apply `function` to the parameters and buffers of a module, in place."""
    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None:
                part._parameters[name] = nn.Parameter(function(x.detach()), x.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = function(buffer)
    return module


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the tensors saved for the backward pass, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {x.untyped_storage()._cdata for x in model.parameters()}
        self._sizes: dict[int, int] = {}
        super().__init__(self._save, lambda x: x)

    def _save(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._parameters:
            self._sizes[storage._cdata] = storage.nbytes()
        return x

    def total(self) -> int:
        return sum(self._sizes.values())


class TensorLists(TorchDispatchMode):
    """Counts operators on lists of tensors, which `count_kernels` ignores, as one launch each."""

    launches = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.launches += name.startswith(("_foreach_", "_fused_", "_amp_"))
        return function(*args, **(kwargs or {}))


def count_step(cfg: Any, clips: int) -> dict[str, int]:
    """Count all launches, Triton launches, and bytes saved for backward in a training step."""
    device, kind, crop = device_of(cfg), label_kind(cfg), cfg.DATA.TRAIN_CROP_SIZE
    with device:
        model = build_model(cfg).train()
        clip = torch.empty(clips, 3, cfg.DATA.NUM_FRAMES, crop, crop)
        labels = torch.zeros(clips, dtype=torch.long)
    optimizer = build_optimizer(model, cfg)
    scaler = torch.amp.GradScaler(device.type, enabled=scales_loss(cfg))

    def step() -> int:
        saved = SavedBytes(model)
        with saved:
            with autocast(cfg, device):
                logits = model([clip]).float()
            loss = classification_loss(logits, labels, kind, cfg.SOLVER.SMOOTHING)
        count_correct(logits.detach(), labels, kind)
        factor = torch.where(loss.detach().isfinite(), 1.0, math.nan)
        scaler.scale(loss * factor).backward()
        set_lr(optimizer, 1e-4)
        scaler.unscale_(optimizer)
        largest = cfg.SOLVER.CLIP_GRAD or math.inf
        norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
        else:
            step_if_finite(optimizer, norm)
        optimizer.zero_grad(set_to_none=True)
        return saved.total()

    step()  # creates the optimiser's state
    with TensorLists() as lists:
        kernels, saved = count_kernels(step)
    # Our kernels are named after their functions, PyTorch's operators are attributes of aten.
    triton = sum(kernel.launches for kernel in kernels if not hasattr(torch.ops.aten, kernel.name))
    launches = lists.launches + sum(kernel.launches for kernel in kernels)
    return {"launches": launches, "triton": triton, "saved": saved}


def main(clips: str, *cases: str) -> None:
    """Print the counts of each case as a line of JSON."""
    patch_torch()
    for case in cases:
        config, kernels = case.split(":")
        options = ["NUM_GPUS", 1, "TRAIN.BATCH_SIZE", int(clips), "VIT.KERNELS", kernels]
        options += ["SOLVER.USE_MIXED_PRECISION", True, "SOLVER.PRECISION", "bfloat16"]
        with FakeTensorMode():
            print(json.dumps(count_step(load_config(config, options), int(clips))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
