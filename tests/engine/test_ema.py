"""EMA weights against a float64 reference, and their use as the weights of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slowfast_lara.engine.ema import ModelEMA


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("samples", torch.zeros(4))


def set_weights(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_average_equals_its_definition(decay):
    model = Model()
    set_weights(model, 0)
    ema = ModelEMA(model, decay)
    expected = model.layer.weight.detach().double()
    for step in range(40):
        set_weights(model, step + 1)
        ema.update()
        kept = min(decay, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * model.layer.weight.detach().double()
    found = ema.state_dict()["layer.weight"].double()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    assert ema.steps == 40


def test_state_dict_is_complete_and_only_weights_are_averaged():
    model = Model()
    ema = ModelEMA(model, 0.9)
    set_weights(model, 1)
    model.samples += 1  # as if an estimator redrew its samples
    ema.update()
    state = ema.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["samples"], torch.ones(4))
    assert torch.equal(state["frozen"], torch.ones(2))
    assert not torch.equal(state["layer.bias"], model.layer.bias)


def test_swapped_in_restores_the_weights_after_an_error():
    model = Model()
    set_weights(model, 0)
    ema = ModelEMA(model, 0.9)
    set_weights(model, 1)
    ema.update()
    own, averaged = model.layer.weight.detach().clone(), ema.state_dict()["layer.weight"].clone()
    with pytest.raises(RuntimeError, match="inside"), ema.swapped_in():
        assert torch.equal(model.layer.weight, averaged)
        raise RuntimeError("inside")
    assert torch.equal(model.layer.weight, own)
    assert torch.equal(ema.state_dict()["layer.weight"], averaged)


def test_the_optimiser_is_not_affected_by_swapping():
    """Steps with and without swapping in between give the same weights."""
    ends = []
    for swap in (False, True):
        model = Model()
        set_weights(model, 0)
        ema = ModelEMA(model, 0.9)
        optimizer = torch.optim.AdamW(model.layer.parameters(), fused=True)
        for _ in range(5):
            model.layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
            if swap:
                with ema.swapped_in():
                    model.layer(torch.ones(1, 3))
        ends.append([*model.parameters(), *ema.state_dict().values()])
    assert all(map(torch.equal, *ends))
