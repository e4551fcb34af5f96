"""Which attention is nearest to exact attention in a trained model, and at which cost.

Every attention, with each of its proposals and kinds of landmarks and with several numbers
of them, on the q, k, v of the model's layers for some videos. The error of a setting is

    sum_n w_n |estimate_n - exact_n|^2 / sum_n w_n |exact_n|^2

over the tokens n of a layer in all videos, then the mean over layers. All w_n are 1, or w_n
is how much the token changes: the mean absolute difference of its pixels to the tokens at
the same place before and after it. The cost is the number of products of the spatial stage.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn import functional

from slowfast_lara.analysis.approximation_error import RA_QUERIES, those_that_fit
from slowfast_lara.analysis.measure import count_flops
from slowfast_lara.analysis.result_files import aligned_table, csv_text, measured_on
from slowfast_lara.attention import ESTIMATORS, Estimator, estimator_options, softmax_attention
from slowfast_lara.config.yaml_files import to_yaml
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.drawing import plain_text, saved_figure
from slowfast_lara.errors import first_line
from slowfast_lara.files import write_text
from slowfast_lara.inference.layers import LayerInputs, estimator_for, layer_inputs, middle_view
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.inference.videos import find_videos
from slowfast_lara.models.attention_config import EXACT, display_name, resolve_estimator
from slowfast_lara.progress import progress_bar

# Options of an estimator that say what its samples or landmarks are: all choices are tried.
RANGED = ("proposal", "landmarks", "biased")


class Setting(NamedTuple):
    """An attention, those of its options that are tried, and its number of landmarks."""

    name: str
    options: dict[str, Any]
    landmarks: int | None  # None: it has none, or a number of samples of its own

    @property
    def label(self) -> str:
        """As people read it: "lara global", "ra biased", "exact"."""
        chosen = [(key, value) for key, value in self.options.items() if value is not False]
        words = [key if value is True else str(value) for key, value in chosen]
        return " ".join([display_name(self.name), *words])

    def build(
        self, inputs: LayerInputs, cfg: CfgNode, seed: int, kernels: str = "auto"
    ) -> Estimator:
        changes = {**self.options, "kernels": kernels}
        if self.landmarks is not None:
            changes["num_landmarks"] = self.landmarks
        return estimator_for(inputs, self.name, cfg, seed=seed, **changes)

    def config_lines(self) -> str:
        """YAML for a config."""
        vit: dict[str, Any] = {"APPROX_ATTN_TYPE": self.name}
        if self.landmarks is not None:
            vit["APPROX_ATTN_DIM"] = self.landmarks
        if self.options:
            vit[self.name.upper()] = {key.upper(): value for key, value in self.options.items()}
        return to_yaml({"VIT": vit})


def settings_of(names: Sequence[str], numbers: Sequence[int]) -> list[Setting]:
    """Attentions, with all choices of the ranged options and these numbers of landmarks."""
    found = []
    for name in names:
        choices = [
            [(key, choice) for choice in option.choices or (False, True)]
            for key, option in estimator_options(name).items()
            if key in RANGED
        ]
        has_landmarks = "num_landmarks" in inspect.signature(ESTIMATORS[name]).parameters
        for options in itertools.product(*choices):
            for number in numbers if has_landmarks else [None]:
                found.append(Setting(name, dict(options), number))
    return found


class Row(NamedTuple):
    """A setting's products in one layer for one clip, and its errors, by layer."""

    setting: Setting
    products: float
    errors: list[float]
    moving_errors: list[float]  # with tokens weighed by how much they change

    @property
    def error(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def moving_error(self) -> float:
        return sum(self.moving_errors) / len(self.moving_errors)


@dataclass
class NearestTable:
    """All settings; exact attention is the first."""

    source: str
    layers: Sequence[int]
    budget: float  # what may be recommended, as a share of the products of exact attention
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    def share(self, row: Row) -> float:
        return row.products / self.rows[0].products

    def nearest(self, error: str) -> Row | None:
        """The row of the smallest "error" or "moving_error" that the budget allows."""
        allowed = [row for row in self.rows[1:] if self.share(row) <= self.budget]
        return min(allowed, key=lambda row: getattr(row, error), default=None)

    def unbeaten(self, row: Row) -> bool:
        """Whether no other setting is nearer at the same cost or less."""
        return not any(
            other.products <= row.products and other.error < row.error for other in self.rows
        )

    def head(self) -> list[str]:
        return [
            f"squared error to exact attention, as a share of its square: {self.source}",
            "moving: tokens count by how much their pixels change; *: none nearer for as little",
            measured_on(),
            *self.notes,
        ]

    def cells(self) -> list[list[str]]:
        titles = ["attention", "landmarks", "products", "of exact, %", "error", "moving", ""]
        rows = [
            [
                row.setting.label,
                str(row.setting.landmarks or ""),
                f"{row.products:.0f}",
                f"{100 * self.share(row):.1f}",
                f"{row.error:.4f}",
                f"{row.moving_error:.4f}",
                "*" if self.unbeaten(row) else "",
            ]
            for row in self.rows
        ]
        return [titles, *rows]

    def text(self) -> str:
        return "\n".join([*self.head(), aligned_table(self.cells()), "", *self.advice()])

    def advice(self) -> list[str]:
        """Which setting is nearest within the budget, and the config lines for it."""
        limit = f"of those with at most {100 * self.budget:g} % of exact attention's products"
        by_all, by_moving = self.nearest("error"), self.nearest("moving_error")
        if by_all is None or by_moving is None:
            return [f"{limit}: none; give a larger --budget or smaller --samples"]
        if by_all is by_moving:
            return [self._praise("nearest, also by moving tokens", limit, by_all)]
        return [
            self._praise("nearest", limit, by_all),
            self._praise("nearest by moving tokens", limit, by_moving),
        ]

    def _praise(self, what: str, limit: str, row: Row) -> str:
        number = f" with {row.setting.landmarks} landmarks" if row.setting.landmarks else ""
        figures = f"error {row.error:.4f}, moving {row.moving_error:.4f}"
        cost = f"{100 * self.share(row):.1f} % of the products"
        lines = row.setting.config_lines()
        return f"{what}, {limit}: {row.setting.label}{number} ({figures}, {cost})\n{lines}"

    def write(self, path: str) -> None:
        """PATH.csv, with the errors of all layers, and PATH.png."""
        by_layer = [
            [*(f"error {layer}" for layer in self.layers), *(f"moving {n}" for n in self.layers)],
            *([f"{error:.6e}" for error in (*r.errors, *r.moving_errors)] for r in self.rows),
        ]
        rows = [cells[:-1] + more for cells, more in zip(self.cells(), by_layer)]
        write_text(f"{path}.csv", csv_text(rows, self.head()))
        with saved_figure(f"{path}.png", (11, 4.6), columns=2) as (figure, axes):
            for axis, error in zip(axes, ("error", "moving_error")):
                labels = dict.fromkeys(row.setting.label for row in self.rows[1:])
                for place, label in enumerate(labels):
                    rows_of = [row for row in self.rows if row.setting.label == label]
                    xs = [100 * self.share(row) for row in rows_of]
                    ys = [getattr(row, error) for row in rows_of]
                    style = f"{'os^Dv'[place // 10 % 5]}-"  # there are ten colours
                    axis.plot(xs, ys, style, label=plain_text(label))
                axis.set(xscale="log", yscale="log", xlabel="products, % of exact attention")
            axes[0].set_ylabel("relative squared error, all tokens alike")
            axes[1].set_ylabel("relative squared error, moving tokens count more")
            axes[1].legend(fontsize=7)
            figure.suptitle(self.source, fontsize=9)


def nearest_in_model(
    model_files: tuple[str, str | None],
    overrides: Sequence[str],
    videos: Sequence[str],
    *,
    attentions: Sequence[str] | None,
    layer: int | None,
    samples: Sequence[int],
    seeds: int,
    budget: float,
) -> NearestTable:
    """Measure all settings on the middle views of the videos, in all layers or in one."""
    names = _with_exact(attentions or list(ESTIMATORS))
    model = load(*model_files, overrides=overrides)
    layers = range(model.cfg.VIT.DEPTH) if layer is None else [layer]
    in_folders = dataset_class(model.cfg, "TEST").frames_in_folders
    paths = find_videos(videos, frames_in_folders=in_folders)
    notes: list[str] = []

    def choose(tokens: int) -> list[Setting]:
        numbers, left_out = those_that_fit(samples, tokens)
        notes.extend(left_out)
        return settings_of(names, numbers)

    rows = measure_settings(model, choose, paths, layers, seeds, notes)
    source = f"{model.path}, {len(layers)} layers, {len(paths)} videos"
    return NearestTable(source, layers, budget, rows, notes)


@torch.no_grad()
def measure_settings(
    model: TrainedModel,
    choose: Callable[[int], list[Setting]],
    paths: Sequence[str],
    layers: Sequence[int],
    seeds: int,
    notes: list[str],
) -> list[Row]:
    """Costs and errors of the settings that are chosen for a number of tokens."""
    cfg, sums = model.cfg, torch.zeros(0)
    costs: list[tuple[Setting, float]] = []
    with progress_bar(len(paths) * len(layers), "approximation error", unit="layer") as bar:
        for path in paths:
            view = middle_view(path, cfg)
            inputs = layer_inputs(model.network, view, cfg, layers)
            if not costs:  # the first video
                costs = _costs(choose(inputs[0].q.shape[2]), inputs[0], cfg, notes)
                sums = torch.zeros(len(costs), len(layers), 2, 2, dtype=torch.float64)
            weights = token_weights(view, cfg).to(inputs[0].q.device)
            for place, given in enumerate(inputs):
                sums[:, place] += _squares([s for s, _ in costs], given, weights, cfg, seeds)
                bar.update()
    errors = (sums[..., 0] / sums[..., 1]).tolist()  # [settings, layers, 2]
    return [Row(*cost, *map(list, zip(*found))) for cost, found in zip(costs, errors)]


def _with_exact(names: Sequence[str]) -> list[str]:
    """Exact attention first, whose cost is the measure of the others'."""
    return list(dict.fromkeys([EXACT, *map(resolve_estimator, names)]))


def token_weights(view: Tensor, cfg: CfgNode) -> Tensor:
    """[2, N]: ones, and how much each token changes, of mean 1; view [3,T,H,W].

    The change is the mean absolute difference of a token's pixels to the tokens at the same
    place before and after it. In a video that stands still, all tokens count alike.
    """
    patch, frames = cfg.VIT.PATCH_SIZE, cfg.VIT.PATCH_SIZE_TEMP
    moments = view.unflatten(1, (-1, frames)).mean(2)  # [3,F,H,W]
    if moments.shape[1] == 1:  # nothing comes before or after
        return torch.ones(2, (view.shape[2] // patch) * (view.shape[3] // patch))
    steps = functional.avg_pool2d(moments.diff(dim=1).abs().mean(0), patch).flatten(1)  # [F-1,P]
    before, after = functional.pad(steps, (0, 0, 1, 0)), functional.pad(steps, (0, 0, 0, 1))
    # The first and the last frame have one neighbour.
    neighbours = torch.full((len(before), 1), 2.0)
    neighbours[[0, -1]] = 1.0
    changes = ((before + after) / neighbours).flatten()
    equal = torch.ones_like(changes)
    return torch.stack((equal, changes / changes.mean() if changes.any() else equal))


def _costs(
    settings: Sequence[Setting], inputs: LayerInputs, cfg: CfgNode, notes: list[str]
) -> list[tuple[Setting, float]]:
    """The settings that can be, with their products; the others are noted."""
    # The counter does not see into the kernels of GPUs.
    inputs = inputs._replace(q=inputs.q.cpu(), k=inputs.k.cpu(), v=inputs.v.cpu())
    q, k, v, num_frames, _ = inputs
    found = []
    for setting in settings:
        some = _queries(setting, q.shape[2])
        try:
            layer = _WithFrames(setting.build(inputs, cfg, seed=0, kernels="torch"), num_frames)
            products = count_flops(layer, q[:, :, some], k, v)
        except ValueError as error:
            number = "" if setting.landmarks is None else f" with {setting.landmarks}"
            notes.append(f"left out: {setting.label}{number}: {first_line(error)}")
            continue
        found.append((setting, products * q.shape[2] / q[:, :, some].shape[2]))
    return found


class _WithFrames(nn.Module):
    """An estimator for the counter, which passes tensors only."""

    def __init__(self, estimator: Estimator, num_frames: int) -> None:
        super().__init__()
        self.estimator, self.num_frames = estimator, num_frames

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.estimator(q, k, v, num_frames=self.num_frames)


def _queries(setting: Setting, tokens: int) -> slice:
    """All tokens, or some where each query is on its own and takes long."""
    return slice(None, None, max(1, tokens // RA_QUERIES) if setting.name == "ra" else 1)


def _squares(
    settings: Sequence[Setting], inputs: LayerInputs, weights: Tensor, cfg: CfgNode, seeds: int
) -> Tensor:
    """[settings, 2, 2]: by weights [2,N], squared errors and squares of exact attention."""
    q, k, v, num_frames, _ = inputs
    exact = softmax_attention(q, k, v, num_frames=num_frames)
    found = []
    for setting in settings:
        some = _queries(setting, q.shape[2])
        random = "seed" in inspect.signature(ESTIMATORS[setting.name]).parameters
        error = torch.zeros_like(weights[0, some])
        for seed in range(seeds if random else 1):
            estimate = setting.build(inputs, cfg, seed)(q[:, :, some], k, v, num_frames=num_frames)
            error += (estimate - exact[:, :, some]).square().sum((0, 1, 3, 4))
        error /= seeds if random else 1
        squares = torch.stack((error, exact[:, :, some].square().sum((0, 1, 3, 4))))  # [2,n]
        found.append(weights[:, some].double() @ squares.double().T)
    return torch.stack(found).cpu()
