"""Error of each attention on random q, k, v, compared with exact attention (paper, figure 1).

The q, k, v of neighbouring tokens are correlated, as in a video.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from fvcore.common.config import CfgNode
from torch.nn import functional

from benchmarks.tables import plot_over_sizes
from slowfast_lara.analysis.settings import fitting_numbers, vary
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.attention import ESTIMATORS, build_estimator, softmax_attention
from slowfast_lara.drawing import saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.inference.layers import LayerInputs
from slowfast_lara.models.attention_config import EXACT

AXIS = "samples or landmarks"


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


@torch.no_grad()
def measure_errors(
    inputs: LayerInputs, cfg: CfgNode, samples: Sequence[int], seeds: int
) -> ErrorTable:
    """Measure all approximate attentions, with the options in `cfg`; RA biased and unbiased."""
    q, k, v, num_frames, _ = inputs
    title = "mean squared error to exact attention, random q, k, v with correlated neighbours"
    fitting = [number for number in samples if number <= q.shape[2]]
    larger = ", ".join(str(number) for number in samples if number > q.shape[2])
    if not fitting:
        limit = f"at most {q.shape[2]}, the number of tokens"
        raise InputError(f"--samples is {min(samples)}; must be {limit}")
    notes = [f"skipped {larger} samples: the layer has {q.shape[2]} tokens"] if larger else []
    table = ErrorTable(title, fitting, notes=notes)
    exact = softmax_attention(q, k, v, num_frames=num_frames)
    approximate = [name for name, cls in ESTIMATORS.items() if not cls.exact]
    for setting in vary(approximate, ("biased",)):
        possible = fitting_numbers(setting.name, fitting, q.shape[2], num_frames, table.notes)
        table.errors[setting.label] = [math.nan] * len(fitting)
        for number in possible:
            squares = setting._replace(number=number).squared_errors(inputs, exact, cfg, seeds)
            mean = squares.mean().item() / exact[:, :, 0].numel()
            table.errors[setting.label][fitting.index(number)] = mean
    return table


def smooth_inputs(
    frames: int = 4, side: int = 14, heads: int = 2, d: int = 32, seed: int = 0
) -> LayerInputs:
    """Random q, k, v that vary smoothly over space and time, on the scale of a few tokens.

    The query and key of a token share half of their variance, because tokens of a trained model
    attend to similar tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 4 * heads * d, 2, 5, 5, generator=generator)
    smooth = functional.interpolate(coarse, size=(frames, side, side), mode="trilinear")
    tokens = smooth.view(4, 1, heads, d, -1).transpose(3, 4)
    q, k, v, shared = (tokens / tokens.std()).unbind(0)
    q, k = (q + shared) / 2**0.5, (k + shared) / 2**0.5
    return LayerInputs(q, k, v, frames, build_estimator(EXACT, head_dim=d))
