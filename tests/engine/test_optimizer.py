"""Learning-rate schedule, parameter groups, skipped steps and optimiser state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from slowfast.utils import lr_policy
from torch import nn

from slowfast_lara.config import get_cfg
from slowfast_lara.engine.optimizer import (
    batch_lr_factor,
    build_optimizer,
    load_optimizer,
    lr_at,
    set_lr,
    step_if_finite,
)
from slowfast_lara.errors import ConfigError
from slowfast_lara.models.motionformer import VisionTransformer


def config(**solver):
    cfg = get_cfg()
    for key, value in {"BASE_LR": 0.1, "MAX_EPOCH": 10, **solver}.items():
        cfg.SOLVER[key] = value
    return cfg


def test_cosine_that_ends_at_zero_equals_pyslowfast():
    cfg = config(WARMUP_EPOCHS=2.0, WARMUP_START_LR=0.01)
    for epoch in (0, 0.3, 1.999, 2, 5.5, 10):
        assert lr_at(cfg, epoch) == pytest.approx(lr_policy.get_lr_at_epoch(cfg, epoch), abs=1e-15)


def test_cosine_ends_at_cosine_end_lr():
    cfg = config(COSINE_END_LR=0.02)
    assert lr_at(cfg, 0) == pytest.approx(0.1)
    assert lr_at(cfg, 10) == pytest.approx(0.02)
    middle = 0.02 + 0.08 * (1 + math.cos(math.pi * 0.3)) / 2
    assert lr_at(cfg, 3) == pytest.approx(middle)


def test_warmup_rises_with_small_base_lr():
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


def test_lr_factor_is_relative_to_the_reference_batch():
    assert batch_lr_factor(config(), 64) == 1.0
    assert batch_lr_factor(config(REFERENCE_BATCH=256), 64) == 0.25


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


@pytest.mark.parametrize("layer", ["trajectory", "joint", "divided"])
@pytest.mark.parametrize("positions", ["separate", "joint"])
def test_layer_decay_lowers_the_rate_of_early_layers(layer, positions):
    """With 0.5 per layer and three blocks, the embeddings have 1/16 of the rate."""
    model = VisionTransformer(
        num_classes=3, dim=8, depth=3, num_heads=2, attn_layer=layer, pos_embed=positions
    )
    optimizer = build_optimizer(model, config(LAYER_DECAY=0.5, WEIGHT_DECAY=0.05))
    set_lr(optimizer, 0.08)
    lr, decay = (
        {id(p): group[key] for group in optimizer.param_groups for p in group["params"]}
        for key in ("lr", "weight_decay")
    )
    after = {"norm": 1.0, "pre_logits": 1.0, "head": 1.0}
    blocks = {"0": 0.125, "1": 0.25, "2": 0.5}
    no_decay = {"cls_token", "pos_embed", "temp_embed", "st_embed"}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert lr.keys() == {id(p) for p in trained.values()}
    for name, p in trained.items():
        first, *rest = name.split(".")
        share = blocks[rest[0]] if first == "blocks" else after.get(first, 1 / 16)
        assert lr[id(p)] == pytest.approx(0.08 * share), name
        assert decay[id(p)] == (0.0 if p.ndim <= 1 or name in no_decay else 0.05), name


def test_without_layer_decay_there_are_two_groups():
    """As in checkpoints of earlier versions: with weight decay, then without."""
    optimizer = build_optimizer(Model(), config(WEIGHT_DECAY=0.05))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 4]
    set_lr(optimizer, 0.3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]


METHODS = ("sgd", "adam", "adamw")


def optimizer_after_a_step(method, **solver):
    torch.manual_seed(0)
    model = Model()
    optimizer = build_optimizer(model, config(OPTIMIZING_METHOD=method, MOMENTUM=0.9, **solver))
    give_gradients(model)
    step_if_finite(optimizer, torch.tensor(1.0))
    return model, optimizer


def give_gradients(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)


def tensors_of(model, optimizer):
    states = [x for state in optimizer.state_dict()["state"].values() for x in state.values()]
    return [x.clone() for x in (*model.parameters(), *states)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped(method, norm):
    model, optimizer = optimizer_after_a_step(method)
    before = tensors_of(model, optimizer)
    model.layer.bias.grad[1] = math.nan
    step_if_finite(optimizer, torch.tensor(norm))
    assert all(map(torch.equal, before, tensors_of(model, optimizer)))
    give_gradients(model)
    step_if_finite(optimizer, torch.tensor(1.0))  # the next step is taken
    after = tensors_of(model, optimizer)
    assert all(x.isfinite().all() for x in after)
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("method", METHODS)
def test_state_of_an_unfused_optimiser_is_loaded(method):
    """Checkpoints of earlier versions have such states."""
    model, optimizer = optimizer_after_a_step(method)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group.update(fused=None, foreach=None)
    weights = copy.deepcopy(model.state_dict())
    give_gradients(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    step_if_finite(optimizer, torch.tensor(1.0))
    other = Model()
    other.load_state_dict(weights)
    resumed = build_optimizer(other, config(OPTIMIZING_METHOD=method, MOMENTUM=0.9))
    load_optimizer(resumed, state)
    for parameter, gradient in zip(other.parameters(), gradients):
        parameter.grad = gradient
    step_if_finite(resumed, torch.tensor(1.0))
    assert all(map(torch.equal, tensors_of(model, optimizer), tensors_of(other, resumed)))


def test_state_of_other_parameters_is_refused():
    _, optimizer = optimizer_after_a_step("adamw")
    with pytest.raises(ValueError):
        load_optimizer(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]), optimizer.state_dict())


def test_contradicting_settings_are_a_config_error():
    with pytest.raises(ConfigError, match="Nesterov"):
        build_optimizer(Model(), config(OPTIMIZING_METHOD="sgd", DAMPENING=0.5))
