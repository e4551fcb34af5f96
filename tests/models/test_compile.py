"""MODEL.COMPILE: compiled forward and backward pass of a training step, without graph breaks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from slowfast_lara.config import load_config
from slowfast_lara.models import build_model


@pytest.fixture()
def without_inductor(monkeypatch):
    """Trace the forward and the backward pass, but run PyTorch's operators."""
    torch._dynamo.reset()
    counters.clear()
    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)


def step(*opts):
    cfg = load_config("quick/softmax", ["VIT.DEPTH", 2, "VIT.DROP_PATH", 0.3, *opts])
    torch.manual_seed(0)
    model = build_model(cfg).train()
    size = cfg.DATA.TRAIN_CROP_SIZE
    clip = torch.randn(2, 3, cfg.DATA.NUM_FRAMES, size, size)
    loss = functional.cross_entropy(model([clip]).float(), torch.arange(2))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.slow
@pytest.mark.parametrize("keep", [None, "nothing", "attention"])
def test_a_compiled_step_equals_an_eager_one(without_inductor, keep):
    opts = ["MODEL.ACT_CHECKPOINT", True, "VIT.ACT_CHECKPOINT_KEEP", keep] if keep else []
    loss, gradients = step(*opts)
    assert not counters["stats"]
    compiled_loss, compiled = step("MODEL.COMPILE", True, *opts)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["aot_autograd"]["ok"] == 1  # the backward pass, too
    assert torch.allclose(compiled_loss, loss, rtol=1e-5) and compiled.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert torch.allclose(compiled[name], expected, rtol=1e-3, atol=1e-5), name
