"""The moving average of the weights against float64, and how a model is lent it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slowfast_lara.engine.weight_average import WeightAverage


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
def test_it_is_the_sum_that_its_definition_says(decay):
    model = Model()
    set_weights(model, 0)
    average = WeightAverage(model, decay)
    expected = model.layer.weight.detach().double()
    for step in range(40):
        set_weights(model, step + 1)
        average.update()
        kept = min(decay, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * model.layer.weight.detach().double()
    found = average.state()["layer.weight"].double()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    assert average.steps == 40


def test_all_of_the_model_is_in_its_state_and_only_weights_are_averaged():
    model = Model()
    average = WeightAverage(model, 0.9)
    set_weights(model, 1)
    model.samples += 1  # as an estimator may draw its samples anew
    average.update()
    state = average.state()
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["samples"], torch.ones(4))
    assert torch.equal(state["frozen"], torch.ones(2))
    assert not torch.equal(state["layer.bias"], model.layer.bias)


def test_the_model_has_it_meanwhile_and_its_own_back_afterwards():
    model = Model()
    set_weights(model, 0)
    average = WeightAverage(model, 0.9)
    set_weights(model, 1)
    average.update()
    own, averaged = model.layer.weight.detach().clone(), average.state()["layer.weight"].clone()
    with pytest.raises(RuntimeError, match="in between"), average.in_place():
        assert torch.equal(model.layer.weight, averaged)
        raise RuntimeError("in between")
    assert torch.equal(model.layer.weight, own)
    assert torch.equal(average.state()["layer.weight"], averaged)


def test_an_optimiser_goes_on_with_the_models_own():
    """The same steps with and without a loan in between."""
    ends = []
    for lend in (False, True):
        model = Model()
        set_weights(model, 0)
        average = WeightAverage(model, 0.9)
        optimizer = torch.optim.AdamW(model.layer.parameters(), fused=True)
        for _ in range(5):
            model.layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            if lend:
                with average.in_place():
                    model.layer(torch.ones(1, 3))
        ends.append([*model.parameters(), *average.state().values()])
    assert all(map(torch.equal, *ends))
