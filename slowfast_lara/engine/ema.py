"""Exponential moving average (EMA) of the weights.

After each optimiser step, average = d * average + (1 - d) * weights. The decay d is the smaller of
SOLVER.EMA_DECAY and (1 + n) / (10 + n), where n is the number of earlier steps: a low decay in the
first steps keeps the random initial weights from dominating the average of a short training run.
Buffers, such as the fixed samples of an estimator, are not averaged.

PyTorch's AveragedModel is not used, because each of its updates reads a counter from the device and
so waits for all queued work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class ModelEMA:
    """EMA of the trainable parameters of a model (not its DDP wrapper), initialised as a copy."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.steps = 0
        self._parameters: dict[str, Tensor] = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._averages = {name: x.detach().clone() for name, x in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; call this after every optimiser step, even a skipped one."""
        decay = min(self._decay, (1 + self.steps) / (10 + self.steps))
        averages, weights = list(self._averages.values()), list(self._parameters.values())
        torch._foreach_lerp_(averages, weights, 1 - decay)
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state dict, with the averages in place of the trainable weights."""
        return {**self._model.state_dict(), **self._averages}

    @torch.no_grad()
    def reset(self, steps: int = 0) -> None:
        """Set the average to the current weights, and the number of updates so far to `steps`."""
        for name, parameter in self._parameters.items():
            self._averages[name].copy_(parameter)
        self.steps = steps

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the averages as the weights of the model within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data
