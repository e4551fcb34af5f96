"""The estimators by name, and what they have in common.

Shapes everywhere: B batch, h heads, N queries, F frames, P tokens of a frame,
C landmarks, S samples, d head size. Frame-major means that the F*P tokens come
frame after frame.

An estimator is a module `est(q, k, v, num_frames=F)`: q [B,h,N,d] and k, v
[B,h,F*P,d] to [B,h,N,F,d], an estimate of each query's softmax attention over
the keys of each frame, with the 1/sqrt(d) scaling inside. Its constructor names
those of `SIZES` that it needs; every other argument is an option with a default,
which becomes a config key, VIT.<ESTIMATOR>.<OPTION>. A Literal annotation lists
the choices.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

# What the model gives to any estimator that asks for it. `num_landmarks` is the
# number of landmarks C or of samples S; `seed` that of draws in eval mode.
SIZES = ("head_dim", "num_heads", "num_landmarks", "dropout", "seed")

ESTIMATORS: dict[str, type[Estimator]] = {}


class Estimator(nn.Module):
    """What the registry asks of an estimator's class."""

    # It is softmax attention itself, which may count the CLS token as a key.
    exact = False
    # Its landmarks are made of tokens: there can be no more of them.
    landmarks_are_tokens = False


@dataclass(frozen=True)
class Option:
    """An estimator's own setting: its default and its choices, if listed."""

    default: Any
    choices: tuple[Any, ...] = ()

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, or None."""
        if self.choices:
            known = ", ".join(map(str, self.choices))
            return None if value in self.choices else f"allowed: {known}"
        if type(value) is not type(self.default):
            return f"a value of type {type(self.default).__name__} is expected"
        if type(value) is int and value < 1:
            return "at least 1 is expected"
        if type(value) is float and not 0 <= value < float("inf"):
            return "a finite number of at least 0 is expected"
        return None


def register(name: str) -> Callable[[type[Estimator]], type[Estimator]]:
    """Class decorator that adds an estimator under a name."""

    def add(cls: type[Estimator]) -> type[Estimator]:
        if name in ESTIMATORS:
            raise ValueError(f"an estimator named {name!r} is registered already")
        ESTIMATORS[name] = cls
        return cls

    return add


def estimator_class(name: str) -> type[Estimator]:
    if name not in ESTIMATORS:
        known = ", ".join(ESTIMATORS)
        raise ValueError(f"unknown estimator {name!r}; known: {known}")
    return ESTIMATORS[name]


def estimator_options(name: str) -> dict[str, Option]:
    """The settings of an estimator's own: its constructor's arguments but SIZES."""
    constructor = estimator_class(name).__init__
    hints = typing.get_type_hints(constructor)
    options = {}
    for key, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
        if key not in SIZES:
            hint = hints.get(key)
            literal = typing.get_origin(hint) is typing.Literal
            options[key] = Option(parameter.default, typing.get_args(hint) if literal else ())
    return options


def build_estimator(
    name: str,
    *,
    head_dim: int,
    num_heads: int = 1,
    num_landmarks: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> Estimator:
    """An estimator by name. `num_heads` 1 shares per-head samples by all heads."""
    known = estimator_options(name)
    for key, value in options.items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise TypeError(f"unknown option {key!r} of estimator {name}; allowed: {allowed}")
        # From Python, 2 is as good a coefficient as 2.0.
        if type(known[key].default) is float and type(value) is int:
            options[key] = value = float(value)
        problem = known[key].problem(value)
        if problem:
            raise ValueError(f"option {key} of estimator {name} is {value!r}; {problem}")
    given = dict(zip(SIZES, (head_dim, num_heads, num_landmarks, dropout, seed)))
    for key in ("head_dim", "num_heads", "num_landmarks"):
        if type(given[key]) is not int or given[key] < 1:
            raise ValueError(f"{key} is {given[key]!r}; a whole number of at least 1 is expected")
    wanted = inspect.signature(estimator_class(name).__init__).parameters
    return ESTIMATORS[name](**{key: given[key] for key in SIZES if key in wanted}, **options)
