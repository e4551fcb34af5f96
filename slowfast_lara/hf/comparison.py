"""`compare`: error and cost of each estimator on the q, k, v of a transformers model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from slowfast_lara.analysis.measure import count_macs
from slowfast_lara.analysis.tables import aligned_table
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.hf.dispatch import (
    base_implementation,
    exact_function,
    obstacle,
    register,
    repeat_heads,
)
from slowfast_lara.hf.joint import JointEstimator, has_number
from slowfast_lara.hf.layouts import TokenLayout
from slowfast_lara.hf.swap import layout_of, replaceable_layers

NUMBERS = (32, 64, 128, 256)


class ComparedAttention(NamedTuple):
    """An attention's cost and its relative squared error per layer.

    `share` is the number of MACs divided by that of exact attention.
    """

    attention: str
    number: int  # groups, landmarks or samples; 0 if the attention has none
    share: float
    errors: dict[str, float]

    @property
    def error(self) -> float:
        return sum(self.errors.values()) / len(self.errors)


class Comparison(list[ComparedAttention]):
    """One entry per attention and `number`; `str(comparison)` is a table and a recommendation.

    An attention has no entry for a `number` if no layer has more patches than this number.
    """

    def nearest(self, share: float = 0.5) -> ComparedAttention | None:
        """The most accurate entry with at most `share` of exact attention's MACs; None if none."""
        allowed = (x for x in self if x.share <= share and math.isfinite(x.error))
        return min(allowed, key=lambda x: x.error, default=None)

    def __str__(self) -> str:
        rows: list[list[str]] = [["attention", "number", "MACs, %", "error", "worst layer"]]
        for entry in self:
            worst = max(entry.errors.values())
            figures = [f"{100 * entry.share:.0f}", f"{entry.error:.2g}", f"{worst:.2g}"]
            rows.append([entry.attention, str(entry.number or ""), *figures])
        best = self.nearest()
        advice = "no attention needs at most half of exact attention's MACs with so few tokens"
        if best is not None:
            number = f", groups={best.number}" if best.number else ""
            call = f'hf.use(model, "{best.attention}"{number})'
            advice = f"smallest error at no more than half of the MACs: {call}"
        return f"{aligned_table(rows)}\n{advice}"


def compare(
    model: nn.Module,
    clips: Tensor | Mapping[str, Any],
    *,
    attentions: str | Iterable[str] | None = None,
    numbers: Sequence[int] = NUMBERS,
    prefix: int | None = None,
    frames: int | None = None,
) -> Comparison:
    """Run a model with its own attention, and measure other attentions on its q, k, v.

    The error of an attention in a layer is the sum of squared differences to exact attention,
    divided by the sum of squares of exact attention; the cost is the number of
    multiply-accumulates. The model is not changed. If `use` has replaced its attention, `compare`
    still runs the original one.

    Args:
        model: a model that `use` accepts.
        clips: the model's main input, or a mapping with all inputs.
        attentions: names of estimators, or one name; default: all except exact attention
            and RA, which are quadratic.
        numbers: numbers of groups, landmarks or samples.
        prefix: as in `use`.
        frames: as in `use`.
    """
    if isinstance(attentions, str):
        attentions = [attentions]
    names = list(attentions or (name for name in ESTIMATORS if name not in ("softmax", "ra")))
    settings = [
        (name, number) for name in names for number in (numbers if has_number(name) else (0,))
    ]
    layers = replaceable_layers(model)
    paths = {layer: path for path, layer in layers.items()}
    measurement = _Measurement(paths, settings, partial(layout_of, prefix=prefix, frames=frames))
    configs = {id(layer.config): layer.config for layer in layers.values()}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    inputs = clips if isinstance(clips, Mapping) else {_main_input(model): clips}
    try:
        for config in configs.values():
            name = register("compare", base_implementation(config), measurement)
            config._attn_implementation_internal = name
        with torch.no_grad():
            model(**inputs)
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
    return measurement.result()


def _main_input(model: nn.Module) -> str:
    """The name of a model's input of images or clips."""
    return getattr(model, "main_input_name", "pixel_values")


class _Measurement:
    """An attention function that returns exact attention and records the errors of estimators."""

    def __init__(
        self,
        paths: dict[Any, str],
        settings: list[tuple[str, int]],
        layout: Callable[[Any], TokenLayout],
    ) -> None:
        self._paths, self._settings, self._layout = paths, settings, layout
        # (attention, number) -> layer -> [sum of squared errors, sum of squared exact outputs].
        self._squares: dict[tuple[str, int], dict[str, Tensor]] = {}
        # (attention, number) -> [MACs of the estimator, MACs of exact attention].
        self._macs: dict[tuple[str, int], list[int]] = {}
        self._counted: dict[Any, int] = {}

    def __call__(
        self,
        implementation: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if module in self._paths and not obstacle(
            module, query, key, value, attention_mask, kwargs
        ):
            keys, values = (repeat_heads(x, query.shape[1]) for x in (key, value))
            for setting in self._settings:
                self._measure(setting, module, query, keys, values, kwargs.get("scaling"))
        function = exact_function(module, implementation)
        return function(module, query, key, value, attention_mask, **kwargs)

    def _measure(
        self,
        setting: tuple[str, int],
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
    ) -> None:
        _, heads, tokens, d = q.shape
        name, number = setting
        layout = self._layout(module)
        joint = JointEstimator(name, layout, number or None, head_dim=d, num_heads=heads).eval()
        if joint.obstacle(tokens):
            return
        shape = (setting, layout, q.shape[1:])
        if shape not in self._counted:
            one = [x[:1].float().cpu() for x in (q, k, v)]
            self._counted[shape] = count_macs(partial(joint, *one))
        macs = self._macs.setdefault(setting, [0, 0])
        macs[0] += self._counted[shape]
        macs[1] += 2 * heads * tokens**2 * d
        estimate = joint.to(q.device)(q, k, v, scale)
        exact = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        squares = [x.double().square().sum() for x in (estimate - exact, exact)]
        path = self._paths[module]
        if not squares[1].isfinite():
            raise ValueError(f"{path}: attention is not finite; check the clips and the weights")
        layers = self._squares.setdefault(setting, {})
        layers[path] = layers.get(path, 0) + torch.stack(squares).cpu()

    def result(self) -> Comparison:
        return Comparison(
            ComparedAttention(
                *setting,
                self._macs[setting][0] / self._macs[setting][1],
                {path: (error / exact).item() for path, (error, exact) in layers.items()},
            )
            for setting, layers in self._squares.items()
        )
