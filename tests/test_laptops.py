"""Apple's mps device, simulated by PyTorch's meta device: tensors without values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fvcore.common.config import CfgNode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import slowfast_lara
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.attention.tensors import without_autocast
from slowfast_lara.config import check_machine, load_config
from slowfast_lara.config.load import with_overrides
from slowfast_lara.engine.iteration import AsyncScalars
from slowfast_lara.engine.metrics import count_correct
from slowfast_lara.engine.optimizer import build_optimizer, step_if_finite
from slowfast_lara.errors import ConfigError
from slowfast_lara.inference.scoring import autocast, to_device, view_outputs
from slowfast_lara.labels import label_kind
from slowfast_lara.models.build import build_model, device_of
from slowfast_lara.models.motionformer import VisionTransformer
from slowfast_lara.models.space_time import ATTENTION_LAYERS
from slowfast_lara.runs import checkpoint


def on_mps(*opts: Any) -> CfgNode:
    return load_config("quick/lara", ["DEVICE", "mps", "NUM_GPUS", 0, *opts])


@pytest.mark.parametrize(
    "opts, expected",
    [
        (["DEVICE", "cuda"], "DEVICE is 'cuda'.*auto, mps"),
        (["DEVICE", "mps", "NUM_GPUS", 2], "NUM_GPUS is 2.*must be 0 with DEVICE mps"),
        (["DEVICE", "mps", "NUM_SHARDS", 2], "NUM_SHARDS is 2.*must be 1 with DEVICE mps"),
    ],
)
def test_invalid_devices(opts, expected):
    with pytest.raises(ConfigError, match=expected):
        load_config("quick/lara", ["NUM_GPUS", 0, *opts])


def test_device_of_a_config(monkeypatch):
    assert device_of(load_config("quick/lara")).type == "cpu"
    assert device_of(on_mps()).type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="DEVICE is 'mps'.*no Apple GPU"):
        check_machine(on_mps())


def test_model_trained_on_mps_loads_elsewhere(tmp_path, monkeypatch):
    cfg = load_config("quick/lara", ["VIT.DEPTH", 1])
    content = {"epoch": 0, "model_state": build_model(cfg).state_dict()}
    path = str(tmp_path / "of_a_mac.pyth")
    checkpoint.save(path, {**content, "cfg": with_overrides(cfg, ["DEVICE", "mps"]).dump()})
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    model = slowfast_lara.load(path)
    assert model.cfg.DEVICE == "auto" and next(model.network.parameters()).device.type == "cpu"
    with pytest.raises(ConfigError, match="no Apple GPU"):
        slowfast_lara.load(path, overrides=["DEVICE", "mps"])


@pytest.mark.parametrize("method", ["sgd", "adam", "adamw"])
def test_non_finite_step_is_skipped_on_mps(method):
    """Fused optimisers on mps ignore `found_inf`, so the optimiser must not be fused."""
    layer = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(layer, on_mps("SOLVER.OPTIMIZING_METHOD", method))
    assert not optimizer.defaults["fused"]
    before = layer.weight.clone()
    for norm, moves in ((math.nan, False), (math.inf, False), (1.0, True)):
        layer.weight.grad, layer.bias.grad = torch.full((2, 3), norm), torch.zeros(2)
        step_if_finite(optimizer, torch.tensor(norm))
        assert torch.equal(layer.weight, before) != moves


class NoFloat64(TorchDispatchMode):
    """Fail on float64 tensors that are not on the CPU, as mps does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                assert x.dtype not in (torch.float64, torch.complex128), func
        return out


class RecordCopies(TorchFunctionMode):
    """Record (device, is blocking) of copies to devices, without copying."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            device, _, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
            self.made.append((device.type, not non_blocking))
            return args[0]
        return func(*args, **kwargs)


@pytest.fixture
def any_generator(monkeypatch):
    """CPU generators for all devices: meta tensors draw no numbers."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())


def test_no_float64_detects_float64():
    with NoFloat64(), pytest.raises(AssertionError):
        torch.ones(2, device="meta").double()


def small_model(name: str, layer: str, *opts: Any) -> CfgNode:
    sizes = ["VIT.DEPTH", 1, "VIT.APPROX_ATTN_DIM", 4]
    return on_mps("VIT.APPROX_ATTN_TYPE", name, "VIT.ATTN_LAYER", layer, *sizes, *opts)


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_training_step_without_float64(any_generator, name, layer):
    """Batch, loss and gradients on the meta device."""
    cfg, device = small_model(name, layer), torch.device("meta")
    model = VisionTransformer.from_config(cfg).to(device)
    size = cfg.DATA.TRAIN_CROP_SIZE
    clips, labels = torch.randn(2, 3, cfg.DATA.NUM_FRAMES, size, size), torch.tensor([0, 1])
    with NoFloat64():
        logits, labels = model([to_device(clips, device)]), to_device(labels, device)
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)
        (loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        counts = count_correct(logits.detach(), labels, label_kind(cfg))
        # The statistics are copied to the host, which meta tensors cannot be.
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            AsyncScalars([loss, *counts, norm])
    assert {x.device.type for x in (logits, loss, norm, *counts)} == {"meta"}
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_scores_of_views_without_float64(any_generator, name, layer):
    cfg = small_model(name, layer)
    model = VisionTransformer.from_config(cfg).to("meta").eval()
    size = cfg.DATA.TEST_CROP_SIZE
    views = torch.randn(3, 3, cfg.DATA.NUM_FRAMES, size, size)
    with NoFloat64(), pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        view_outputs(model, views, cfg)


def test_model_is_moved_to_its_device():
    with RecordCopies() as copies:
        model = build_model(on_mps("VIT.DEPTH", 1))
    assert len(copies.made) >= len(list(model.parameters()))
    assert {device for device, _ in copies.made} == {"mps"}


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision_of_the_device(precision):
    cfg = on_mps("SOLVER.USE_MIXED_PRECISION", True, "SOLVER.PRECISION", precision)
    with autocast(cfg, device_of(cfg)):
        assert torch.is_autocast_enabled("mps") and not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("mps") == getattr(torch, precision)
        with without_autocast("mps"):  # as for sums of exponentials
            assert not torch.is_autocast_enabled("mps")


def test_copies_to_and_from_mps_block():
    """Copies to CUDA do not block: its stream keeps the tensor alive."""
    with RecordCopies() as copies:
        x = to_device(torch.ones(()), torch.device("mps"))
        AsyncScalars([x, x])
        to_device(x, torch.device("cuda"))
    assert copies.made == [("mps", True), ("cpu", True), ("cuda", False)]
