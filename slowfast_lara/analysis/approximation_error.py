"""Error of each attention to exact attention, and the settings to compare.

On random q, k, v: the mean squared error over the number of samples, as in the paper's figure 1.
Neighbouring tokens are correlated, as in a video.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional

from slowfast_lara.analysis.tables import Cells, ResultTable, plot_over_sizes
from slowfast_lara.attention import (
    ESTIMATORS,
    Estimator,
    build_estimator,
    estimator_options,
    softmax_attention,
)
from slowfast_lara.config import get_cfg
from slowfast_lara.drawing import saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.inference.layers import LayerInputs, estimator_for
from slowfast_lara.models.attention_config import EXACT, display_name

# RA has quadratic cost for each of its samples: its error is measured on some of the queries.
RA_QUERIES = 64
AXIS = "samples or landmarks"


class Setting(NamedTuple):
    """An attention, the values of its varied options, and its number of landmarks or samples."""

    name: str
    options: dict[str, Any]
    number: int | None = None  # None: the config's, or the attention has none

    @property
    def label(self) -> str:
        """Display name: "lara global", "ra biased", "exact"."""
        chosen = [(key, value) for key, value in self.options.items() if value is not False]
        words = [key if value is True else str(value) for key, value in chosen]
        return " ".join([display_name(self.name), *words])

    def build(
        self, inputs: LayerInputs, cfg: CfgNode, seed: int, kernels: str = "auto"
    ) -> Estimator:
        changes = {**self.options, "kernels": kernels}
        if self.number is not None:
            has_samples = "num_samples" in estimator_options(self.name)
            changes["num_samples" if has_samples else "num_landmarks"] = self.number
        return estimator_for(inputs, self.name, cfg, seed=seed, **changes)

    def queries(self, tokens: int) -> slice:
        """The queries to measure."""
        return slice(None, None, max(1, tokens // RA_QUERIES) if self.name == "ra" else 1)

    def squared_errors(
        self, inputs: LayerInputs, exact: Tensor, cfg: CfgNode, seeds: int
    ) -> Tensor:
        """Squared error of each measured query [n], mean over seeds if the attention is random."""
        q, k, v, num_frames, _ = inputs
        some = self.queries(q.shape[2])
        is_random = "seed" in inspect.signature(ESTIMATORS[self.name]).parameters
        repetitions = range(seeds if is_random else 1)
        errors = []
        for seed in repetitions:
            estimate = self.build(inputs, cfg, seed)(q[:, :, some], k, v, num_frames=num_frames)
            errors.append((estimate - exact[:, :, some]).square().sum((0, 1, 3, 4)))
        return torch.stack(errors).mean(0)


def vary(names: Sequence[str], varied: Sequence[str]) -> list[Setting]:
    """Settings of some attentions with all values of the varied options."""
    settings = []
    for name in names:
        choices = [
            [(key, choice) for choice in option.choices or (False, True)]
            for key, option in estimator_options(name).items()
            if key in varied
        ]
        settings += [Setting(name, dict(options)) for options in itertools.product(*choices)]
    return settings


@dataclass
class ErrorTable(ResultTable):
    """Mean squared errors by attention and number of samples."""

    samples: list[int]
    errors: dict[str, list[float]] = field(default_factory=dict)

    def cells(self) -> Cells:
        rows = [[label, *(f"{x:.3e}" for x in errors)] for label, errors in self.errors.items()]
        return [[AXIS, *self.samples], *rows]

    def csv_cells(self) -> Cells:
        rows = [[label, *(f"{x:.6e}" for x in errors)] for label, errors in self.errors.items()]
        return [["estimator", *self.samples], *rows]

    def plot(self, path: str) -> None:
        with saved_figure(path, (6, 4.2)) as (figure, (axis,)):
            plot_over_sizes(axis, AXIS, self.samples, "mean squared error", self.errors)
            figure.suptitle(self.title, fontsize=9)


def errors_on_random(samples: Sequence[int], seeds: int) -> ErrorTable:
    """Errors of all attentions with the default options on random q, k, v."""
    return measure_errors(smooth_inputs(), get_cfg(), samples, seeds)


@torch.no_grad()
def measure_errors(
    inputs: LayerInputs, cfg: CfgNode, samples: Sequence[int], seeds: int
) -> ErrorTable:
    """Errors of all approximate attentions with the options of a config; of RA both forms."""
    q, k, v, num_frames, _ = inputs
    numbers, notes = fitting_numbers(samples, q.shape[2])
    title = "mean squared error to exact attention, random q, k, v with correlated neighbours"
    table = ErrorTable(title, numbers, notes=notes)
    exact = softmax_attention(q, k, v, num_frames=num_frames)
    approximate = [name for name, cls in ESTIMATORS.items() if not cls.exact]
    for setting in vary(approximate, ("biased",)):
        table.errors[setting.label] = []
        for number in numbers:
            squares = setting._replace(number=number).squared_errors(inputs, exact, cfg, seeds)
            mean = squares.mean().item() / exact[:, :, 0].numel()
            table.errors[setting.label].append(mean)
    return table


def fitting_numbers(samples: Sequence[int], tokens: int) -> tuple[list[int], list[str]]:
    """The numbers of samples up to the number of tokens, and a note about the others."""
    fitting = [number for number in samples if number <= tokens]
    if not fitting:
        raise InputError(f"--samples is {min(samples)}; the layer has {tokens} tokens")
    larger = ", ".join(str(number) for number in samples if number > tokens)
    return fitting, [f"skipped {larger} samples: the layer has {tokens} tokens"] if larger else []


def smooth_inputs(
    frames: int = 4, side: int = 14, heads: int = 2, d: int = 32, seed: int = 0
) -> LayerInputs:
    """Random fields over space and time, smooth on the scale of a few tokens.

    Query and key of a token share half of their variance: a token of a trained model attends to
    similar tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 4 * heads * d, 2, 5, 5, generator=generator)
    smooth = functional.interpolate(coarse, size=(frames, side, side), mode="trilinear")
    tokens = smooth.view(4, 1, heads, d, -1).transpose(3, 4)
    q, k, v, shared = (tokens / tokens.std()).unbind(0)
    q, k = (q + shared) / 2**0.5, (k + shared) / 2**0.5
    return LayerInputs(q, k, v, frames, build_estimator(EXACT, head_dim=d))
