"""How far each estimator is from exact attention, over its number of samples.

The mean squared error to softmax attention, as in the paper's figure 1, on random
q, k, v that are alike in neighbouring tokens, as those of a video are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch.nn import functional

from slowfast_lara.analysis.result_files import (
    aligned_table,
    csv_text,
    measured_on,
    plot_over_sizes,
)
from slowfast_lara.attention import (
    ESTIMATORS,
    build_estimator,
    estimator_options,
    softmax_attention,
)
from slowfast_lara.config import get_cfg
from slowfast_lara.drawing import saved_figure
from slowfast_lara.errors import InputError
from slowfast_lara.files import write_text
from slowfast_lara.inference.layers import LayerInputs, estimator_for
from slowfast_lara.models.attention_config import EXACT

# RA's cost is quadratic, for each of its samples: it is measured on some queries.
RA_QUERIES = 64


class Variant(NamedTuple):
    """An estimator, and what is changed of its options."""

    label: str
    name: str
    changes: dict[str, Any]

    def of_size(self, samples: int) -> dict[str, Any]:
        """The changes for a number of samples or landmarks, by the name it has here."""
        has_samples = "num_samples" in estimator_options(self.name)
        return {**self.changes, "num_samples" if has_samples else "num_landmarks": samples}


def variants() -> list[Variant]:
    """Every estimator but the exact one; of RA both forms, whichever the config has."""
    rows = [
        Variant(name, name, {"biased": False} if name == "ra" else {})
        for name, cls in ESTIMATORS.items()
        if not cls.exact
    ]
    return [*rows, Variant("ra biased", "ra", {"biased": True})]


@dataclass
class ErrorTable:
    """Mean squared errors by estimator and number of samples."""

    source: str
    samples: list[int]
    rows: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def head(self) -> list[str]:
        title = f"mean squared error to exact attention, {self.source}"
        return [title, measured_on(), *self.notes]

    def text(self) -> str:
        rows = [["samples or landmarks", *map(str, self.samples)]]
        rows += [[label, *(f"{error:.3e}" for error in row)] for label, row in self.rows.items()]
        return "\n".join([*self.head(), aligned_table(rows)])

    def write(self, path: str) -> None:
        """PATH.csv and PATH.png."""
        rows = [["estimator", *map(str, self.samples)]]
        rows += [[label, *(f"{error:.6e}" for error in row)] for label, row in self.rows.items()]
        write_text(f"{path}.csv", csv_text(rows, self.head()))
        with saved_figure(f"{path}.png", (6, 4.2)) as (figure, (axis,)):
            error = "mean squared error to exact attention"
            plot_over_sizes(axis, "samples or landmarks", self.samples, error, self.rows)
            figure.suptitle(self.source, fontsize=9)


def errors_on_random(samples: Sequence[int], seeds: int) -> ErrorTable:
    source = "random q, k, v, alike in neighbouring tokens"
    return measure(smooth_inputs(), get_cfg(), source, samples, seeds)


@torch.no_grad()
def measure(
    inputs: LayerInputs, cfg: CfgNode, source: str, samples: Sequence[int], seeds: int
) -> ErrorTable:
    """Errors of all variants with the config's options; of random ones, the mean over seeds."""
    q, k, v, num_frames, _ = inputs
    tokens = q.shape[2]
    numbers, notes = those_that_fit(samples, tokens)
    table = ErrorTable(source, numbers, notes=notes)
    exact = softmax_attention(q, k, v, num_frames=num_frames)
    for variant in variants():
        some = slice(None, None, max(1, tokens // RA_QUERIES) if variant.name == "ra" else 1)
        row = table.rows[variant.label] = []
        for number in table.samples:
            squares = []
            for seed in range(seeds):
                changes = variant.of_size(number)
                estimator = estimator_for(inputs, variant.name, cfg, seed=seed, **changes)
                estimate = estimator(q[:, :, some], k, v, num_frames=num_frames)
                squares.append((estimate - exact[:, :, some]).square().mean().item())
            row.append(sum(squares) / seeds)
    return table


def those_that_fit(samples: Sequence[int], tokens: int) -> tuple[list[int], list[str]]:
    """The numbers of samples that a layer has tokens for, and a note about the others."""
    fitting = [number for number in samples if number <= tokens]
    if not fitting:
        raise InputError(f"--samples: the layer has {tokens} tokens; at most as many are allowed")
    larger = ", ".join(str(number) for number in samples if number > tokens)
    note = f"left out, since the layer has only {tokens} tokens: {larger} samples"
    return fitting, [note] if larger else []


def smooth_inputs(
    frames: int = 4, side: int = 14, heads: int = 2, d: int = 32, seed: int = 0
) -> LayerInputs:
    """Random fields over space and time, smooth on the scale of a few tokens.

    Query and key of a token share half of their variance, since a token of a trained
    model attends to what is like it.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 4 * heads * d, 2, 5, 5, generator=generator)
    smooth = functional.interpolate(coarse, size=(frames, side, side), mode="trilinear")
    tokens = smooth.view(4, 1, heads, d, -1).transpose(3, 4)
    q, k, v, shared = (tokens / tokens.std()).unbind(0)
    q, k = (q + shared) / 2**0.5, (k + shared) / 2**0.5
    return LayerInputs(q, k, v, frames, build_estimator(EXACT, head_dim=d))
