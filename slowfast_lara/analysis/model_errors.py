"""Errors of all attentions in a trained model, their costs, and the recommended setting.

A setting is an attention, the values of its options in VARIED, and a number of landmarks. All
settings are measured on the q, k, v of the model's layers for some videos. The error of a setting
in a layer is

    sum_n w_n |estimate_n - exact_n|^2 / sum_n w_n |exact_n|^2

where the sums are over the tokens n of all videos (for RA, over some evenly spaced tokens), and
estimate_n and exact_n are the outputs for token n. The error of a setting is the mean over layers.
For `error`, w_n is 1. For `moving_error`, w_n is the mean absolute difference between the pixels of
token n and those of the previous and the next token at the same spatial position, divided by the
mean of these differences in the video. The cost is the number of multiply-accumulates (MACs) of the
spatial stage.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional

from slowfast_lara.analysis.measure import count_macs
from slowfast_lara.analysis.settings import (
    Setting,
    fitting_numbers,
    has_landmarks,
    token_counts,
    vary,
)
from slowfast_lara.analysis.tables import Cells, ResultTable
from slowfast_lara.attention import ESTIMATORS, softmax_attention
from slowfast_lara.config.yaml_files import to_yaml
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.drawing import attention_styles, plain_text, saved_figure
from slowfast_lara.errors import DecodeError, InputError, counted, first_line
from slowfast_lara.inference.layers import LayerInputs, check_layer, layer_inputs, middle_view
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.inference.videos import find_videos
from slowfast_lara.models.attention_config import EXACT, resolve_estimator
from slowfast_lara.progress import progress_bar

# The options that determine the samples or landmarks; all values of these options are measured.
VARIED = ("proposal", "landmarks", "biased")


class SettingError(NamedTuple):
    """A setting, its MACs in one layer for one clip, and its two relative errors per layer."""

    setting: Setting
    macs: float
    errors: list[float]
    moving_errors: list[float]

    @property
    def error(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def moving_error(self) -> float:
        return sum(self.moving_errors) / len(self.moving_errors)


@dataclass
class ModelErrorTable(ResultTable):
    """The errors of all settings; the first row is exact attention."""

    layers: Sequence[int]
    budget: float  # maximum cost of a recommendation, relative to the MACs of exact attention
    rows: list[SettingError]

    def head(self) -> list[str]:
        legend = (
            "moving: error weighted by the change of pixels; *: smallest error at this cost or less"
        )
        return [*super().head(), legend]

    def share(self, row: SettingError) -> float:
        return row.macs / self.rows[0].macs

    def best(self, error: str) -> SettingError | None:
        """The row within the budget with the smallest finite `error` ("error" or "moving_error").

        Exact attention does not count. Returns None if there is no such row.
        """
        allowed = [
            row
            for row in self.rows[1:]
            if self.share(row) <= self.budget and math.isfinite(getattr(row, error))
        ]
        return min(allowed, key=lambda row: getattr(row, error), default=None)

    def is_pareto_optimal(self, row: SettingError) -> bool:
        """Whether the error is finite and no setting has a smaller one at the same cost or less."""
        return math.isfinite(row.error) and not any(
            other.macs <= row.macs and other.error < row.error for other in self.rows
        )

    def cells(self) -> Cells:
        rows = [
            [
                row.setting.label,
                row.setting.number or "",
                f"{row.macs:.0f}",
                f"{100 * self.share(row):.1f}",
                f"{row.error:.4g}",
                f"{row.moving_error:.4g}",
                "*" if self.is_pareto_optimal(row) else "",
            ]
            for row in self.rows
        ]
        return [["attention", "landmarks", "MACs", "of exact, %", "error", "moving", ""], *rows]

    def csv_cells(self) -> Cells:
        by_layer = [
            [f"{name} {layer}" for name in ("error", "moving") for layer in self.layers],
            *([f"{error:.6e}" for error in (*r.errors, *r.moving_errors)] for r in self.rows),
        ]
        return [[*cells[:-1], *more] for cells, more in zip(self.cells(), by_layer)]

    def footer(self) -> list[str]:
        """The settings with the smallest errors within the budget, and config lines for each.

        If no setting is within the budget, the cheapest one.
        """
        limit = f"at most {100 * self.budget:g} % of the MACs of exact attention"
        best, best_moving = self.best("error"), self.best("moving_error")
        lines = [""]
        if best is None or best_moving is None:
            lines.append(
                f"no setting with finite errors has {limit}: the model has few tokens, or "
                "--samples is too large"
            )
            cheapest = min(self.rows, key=lambda row: row.macs)
            chosen = {"the cheapest setting is": cheapest}
        elif best is best_moving:
            chosen = {f"smallest error and moving error with {limit}:": best}
        else:
            chosen = {
                f"smallest error with {limit}:": best,
                f"smallest moving error with {limit}:": best_moving,
            }
        for what, row in chosen.items():
            figures = f"error {row.error:.4g}, moving {row.moving_error:.4g}"
            cost = f"{100 * self.share(row):.1f} % of the MACs"
            lines.append(f"{what} {_with_number(row.setting)} ({figures}, {cost})")
            lines.append(config_lines(row.setting))
        return lines

    def plot(self, path: str) -> None:
        with saved_figure(path, (11, 4.6), columns=2) as (figure, axes):
            for axis, error in zip(axes, ("error", "moving_error")):
                labels = list(dict.fromkeys(row.setting.label for row in self.rows[1:]))
                for label, style in zip(labels, attention_styles(labels)):
                    rows = [row for row in self.rows if row.setting.label == label]
                    xs = [100 * self.share(row) for row in rows]
                    ys = [getattr(row, error) for row in rows]
                    axis.plot(xs, ys, label=plain_text(label), **style)
                axis.set(xscale="log", yscale="log", xlabel="MACs, % of exact attention")
            axes[0].set_ylabel("relative squared error")
            axes[1].set_ylabel("relative squared error of moving tokens")
            axes[1].legend(fontsize=7)
            figure.suptitle(self.title, fontsize=9)


def _with_number(setting: Setting) -> str:
    """The label of a setting and its number: "lara global with 64 landmarks"."""
    if setting.number is None:
        return setting.label
    what = "groups" if ESTIMATORS[setting.name].counts_keys_of_a_frame else "landmarks"
    return f"{setting.label} with {setting.number} {what}"


def config_lines(setting: Setting) -> str:
    """YAML lines that select this attention in a config."""
    vit: dict[str, Any] = {"APPROX_ATTN_TYPE": setting.name}
    if setting.number is not None:
        vit["APPROX_ATTN_DIM"] = setting.number
    if setting.options:
        vit[setting.name.upper()] = {key.upper(): value for key, value in setting.options.items()}
    return to_yaml({"VIT": vit})


def errors_in_model(
    model_files: tuple[str, str | None],
    overrides: Sequence[str],
    videos: Sequence[str],
    *,
    attentions: Sequence[str] | None,
    layer: int | None,
    samples: Sequence[int],
    seeds: int,
    budget: float,
    number: int,
) -> ModelErrorTable:
    """Measure all settings on the middle view of some videos, in one layer or all layers.

    At most `number` videos are used, evenly spaced over the given ones.
    """
    names = list(dict.fromkeys([EXACT, *map(resolve_estimator, attentions or ESTIMATORS)]))
    model = load(*model_files, overrides=overrides)
    layers = range(model.cfg.VIT.DEPTH) if layer is None else [layer]
    in_folders = dataset_class(model.cfg, "TEST").frames_in_folders
    found = find_videos(videos, frames_in_folders=in_folders)
    some = np.linspace(0, len(found) - 1, min(number, len(found))).round().astype(int)
    paths = [found[index] for index in some]
    settings, notes = all_settings(names, samples, *token_counts(model.cfg))
    for index in layers:
        check_layer(index, model.cfg)
    _check_readable(paths, model.cfg)
    print(
        f"measuring {counted(len(settings), 'setting')} in {counted(len(layers), 'layer')} on "
        f"{len(paths)} of {counted(len(found), 'video')}",
        file=sys.stderr,
    )
    rows = measure_settings(model, settings, paths, layers, seeds, notes)
    title = (
        "squared error relative to the square of exact attention: "
        f"{model.path}, {counted(len(layers), 'layer')}, {counted(len(paths), 'video')}"
    )
    return ModelErrorTable(title, layers, budget, rows, notes=notes)


def all_settings(
    names: Sequence[str], samples: Sequence[int], tokens: int, num_frames: int
) -> tuple[list[Setting], list[str]]:
    """Settings for all combinations of attention, options in VARIED and number of landmarks.

    Also returns a note for each attention for which a number of landmarks is too large.
    """
    settings: list[Setting] = []
    notes: list[str] = []
    for name in names:
        numbers: Sequence[int | None] = [None]
        if has_landmarks(name):
            numbers = fitting_numbers(name, samples, tokens, num_frames, notes)
        settings += [
            setting._replace(number=number)
            for setting in vary([name], VARIED)
            for number in numbers
        ]
    wanted = [name for name in names if has_landmarks(name)]
    if wanted and not any(setting.number for setting in settings):
        raise InputError(
            f"--samples is {min(samples)}; must be smaller: a clip has {tokens} tokens, "
            f"a frame has {tokens // num_frames}"
        )
    return settings, notes


def _check_readable(paths: Sequence[str], cfg: CfgNode) -> None:
    """Raise DecodeError if no video can be read; `measure_settings` skips unreadable videos."""
    for index, path in enumerate(paths, start=1):
        try:
            middle_view(path, cfg)
            return
        except DecodeError:
            if index == len(paths):
                raise


def measure_settings(
    model: TrainedModel,
    settings: Sequence[Setting],
    paths: Sequence[str],
    layers: Sequence[int],
    seeds: int,
    notes: list[str],
) -> list[SettingError]:
    """Call `measure_samples` on the middle view of each video.

    Adds a note for each video that cannot be read.
    """

    def samples() -> Iterator[tuple[Tensor, list[LayerInputs]] | None]:
        for path in paths:
            try:
                view = middle_view(path, model.cfg)
            except DecodeError as error:
                notes.append(f"skipped {error}")
                yield None
                continue
            inputs = layer_inputs(model.network, view, model.cfg, layers)
            yield token_weights(view, model.cfg), inputs

    return measure_samples(samples(), len(paths), settings, model.cfg, seeds, notes)


@torch.no_grad()
def measure_samples(
    samples: Iterable[tuple[Tensor, list[LayerInputs]] | None],
    number: int,
    settings: Sequence[Setting],
    cfg: CfgNode,
    seeds: int,
    notes: list[str],
) -> list[SettingError]:
    """Measure costs and errors of settings.

    Adds a note for each setting that cannot be built. After the first clip, prints an estimate of
    the remaining time.

    Args:
        samples: for each of `number` clips, the token weights [2,N] and the inputs of each layer,
            or None for a clip that cannot be read.
    """
    sums = torch.zeros(0)
    costs: list[tuple[Setting, float]] = []
    started = time.monotonic()
    with progress_bar(number, "approximation error", unit="video") as bar:
        for index, sample in enumerate(samples, start=1):
            bar.update()
            if sample is None:
                continue
            weights, inputs = sample
            is_first = not costs
            if is_first:
                costs = setting_macs(settings, inputs[0], cfg, notes)
                # [settings, layers, rows of `weights`, (squared error, square of exact attention)]
                sums = torch.zeros(len(costs), len(inputs), 2, 2, dtype=torch.float64)
            weights = weights.to(inputs[0].q.device)
            for layer, given in enumerate(inputs):
                sums[:, layer] += _weighted_sums([s for s, _ in costs], given, weights, cfg, seeds)
            if is_first and index < number:
                seconds, left = time.monotonic() - started, number - index
                print(f"about {seconds * left:.0f} s for {left} more videos", file=sys.stderr)
    errors = (sums[..., 0] / sums[..., 1]).mT.tolist()  # [settings, weights, layers]
    return [SettingError(*cost, *by_layer) for cost, by_layer in zip(costs, errors)]


def token_weights(view: Tensor, cfg: CfgNode) -> Tensor:
    """Two rows of weights [2, N] for the N tokens of a view [3,T,H,W]; each row has mean 1.

    Row 0 is ones. Row 1 is proportional to the mean absolute difference between a token's pixels
    and those of the previous and the next token at the same spatial position. If the video does not
    change or has one temporal token, row 1 is ones, too.
    """
    patch, frames = cfg.VIT.PATCH_SIZE, cfg.VIT.PATCH_SIZE_TEMP
    by_token = view.unflatten(1, (-1, frames)).mean(2)  # [3,F,H,W]
    if by_token.shape[1] == 1:  # no neighbour in time
        return torch.ones(2, (view.shape[2] // patch) * (view.shape[3] // patch))
    steps = functional.avg_pool2d(by_token.diff(dim=1).abs().mean(0), patch).flatten(1)  # [F-1,P]
    before, after = functional.pad(steps, (0, 0, 1, 0)), functional.pad(steps, (0, 0, 0, 1))
    neighbours = torch.full((len(before), 1), 2.0)
    neighbours[[0, -1]] = 1.0
    changes = ((before + after) / neighbours).flatten()
    ones = torch.ones_like(changes)
    return torch.stack((ones, changes / changes.mean() if changes.any() else ones))


def setting_macs(
    settings: Sequence[Setting], inputs: LayerInputs, cfg: CfgNode, notes: list[str]
) -> list[tuple[Setting, float]]:
    """Pairs of a setting and its MACs for all queries; adds a note for each invalid setting."""
    # Run on the CPU, because FlopCounterMode cannot count inside GPU kernels.
    inputs = inputs._replace(q=inputs.q.cpu(), k=inputs.k.cpu(), v=inputs.v.cpu())
    q, k, v, num_frames, _ = inputs
    counted = []
    for setting in settings:
        queries = q[:, :, setting.queries(q.shape[2])]
        try:
            estimator = setting.build(inputs, cfg, seed=0, kernels="torch")
            macs = count_macs(partial(estimator, queries, k, v, num_frames=num_frames))
        except ValueError as error:
            number = "" if setting.number is None else f" with {setting.number}"
            notes.append(f"skipped {setting.label}{number}: {first_line(error)}")
            continue
        counted.append((setting, macs * q.shape[2] / queries.shape[2]))
    return counted


def _weighted_sums(
    settings: Sequence[Setting], inputs: LayerInputs, weights: Tensor, cfg: CfgNode, seeds: int
) -> Tensor:
    """Weighted sums of squared errors and of squared exact outputs: [settings, rows, 2].

    `weights` has one row per kind of error.
    """
    exact = softmax_attention(*inputs[:3], num_frames=inputs.num_frames)
    norms = exact.square().sum((0, 1, 3, 4))
    sums = []
    for setting in settings:
        some = setting.queries(exact.shape[2])
        errors = setting.squared_errors(inputs, exact, cfg, seeds)
        sums.append(weights[:, some].double() @ torch.stack((errors, norms[some])).double().T)
    return torch.stack(sums).cpu()
