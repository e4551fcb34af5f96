"""The learning rate at any point, and which parameters decay."""

from __future__ import annotations

import math

import pytest
import torch
from slowfast.utils import lr_policy
from torch import nn

from slowfast_lara.config import get_cfg
from slowfast_lara.engine.optimizer import build_optimizer, lr_at, lr_scale
from slowfast_lara.errors import ConfigError


def config(**solver):
    cfg = get_cfg()
    for key, value in {"BASE_LR": 0.1, "MAX_EPOCH": 10, **solver}.items():
        cfg.SOLVER[key] = value
    return cfg


def test_cosine_is_pyslowfasts_when_it_ends_at_zero():
    cfg = config(WARMUP_EPOCHS=2.0, WARMUP_START_LR=0.01)
    for epoch in (0, 0.3, 1.999, 2, 5.5, 10):
        assert lr_at(cfg, epoch) == pytest.approx(lr_policy.get_lr_at_epoch(cfg, epoch), abs=1e-15)


def test_cosine_ends_at_its_end():
    cfg = config(COSINE_END_LR=0.02)
    assert lr_at(cfg, 0) == pytest.approx(0.1)
    assert lr_at(cfg, 10) == pytest.approx(0.02)
    middle = 0.02 + 0.08 * (1 + math.cos(math.pi * 0.3)) / 2
    assert lr_at(cfg, 3) == pytest.approx(middle)


def test_warmup_rises_at_the_rates_of_transformers():
    cfg = config(BASE_LR=1e-4, WARMUP_EPOCHS=2.0)
    rates = [lr_at(cfg, epoch) for epoch in (0, 0.5, 1, 1.5, 2)]
    assert rates == sorted(rates) and rates[0] < rates[-1] <= 1e-4


def test_steps_with_warmup():
    cfg = config(
        LR_POLICY="steps_with_relative_lrs",
        STEPS=[0, 4, 8],
        LRS=[1, 0.1, 0.01],
        WARMUP_EPOCHS=1.0,
        WARMUP_START_LR=0.0,
    )
    expected = {0: 0.0, 0.25: 0.025, 1: 0.1, 3.99: 0.1, 4: 0.01, 8: 0.001, 9.9: 0.001, 10: 0.001}
    for epoch, lr in expected.items():
        assert lr_at(cfg, epoch) == pytest.approx(lr)


def test_scale_is_relative_to_the_reference_batch():
    assert lr_scale(config(), 64) == 1.0
    assert lr_scale(config(REFERENCE_BATCH=256), 64) == 0.25


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def no_weight_decay(self):
        return {"cls_token"}


@pytest.mark.parametrize(
    "method, kind",
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)],
)
def test_only_matrices_decay(method, kind):
    model = Model()
    optimizer = build_optimizer(model, config(OPTIMIZING_METHOD=method, WEIGHT_DECAY=0.05))
    assert type(optimizer) is kind
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    expected = {
        "cls_token": 0,
        "layer.weight": 0.05,
        "layer.bias": 0,
        "norm.weight": 0,
        "norm.bias": 0,
    }
    found = {name: decay[id(p)] for name, p in model.named_parameters() if id(p) in decay}
    assert found == expected


def test_settings_that_exclude_each_other_are_one_line():
    with pytest.raises(ConfigError, match="Nesterov"):
        build_optimizer(Model(), config(OPTIMIZING_METHOD="sgd", DAMPENING=0.5))
