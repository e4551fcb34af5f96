"""An exponential moving average of the weights, beside the weights that are trained.

After each optimiser step, average = d * average + (1 - d) * weights, where d is SOLVER.EMA_DECAY,
or (1 + n) / (10 + n) after n steps as long as that is less: so the random start of a short
training does not stay in the average. It is computed on the device, and nothing waits for it.
Buffers, such as an estimator's fixed samples, are not averaged. (PyTorch's AveragedModel reads a
counter from the device at each update, which waits for all work before it.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of a bare model's weights, which starts as a copy of them."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.steps = 0
        self._parameters: dict[str, Tensor] = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._averages = {name: x.detach().clone() for name, x in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step. One that was left out has changed nothing in them."""
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        averages, weights = list(self._averages.values()), list(self._parameters.values())
        torch._foreach_lerp_(averages, weights, 1 - decay)
        self.steps += 1

    def state(self) -> dict[str, Tensor]:
        """All of a model's state, with the averages in place of its weights."""
        return {**self._model.state_dict(), **self._averages}

    @torch.no_grad()
    def begin(self, steps: int = 0) -> None:
        """Take what the model has just been given as the average after so many steps."""
        for name, parameter in self._parameters.items():
            self._averages[name].copy_(parameter)
        self.steps = steps

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages as the model's weights, meanwhile."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data
