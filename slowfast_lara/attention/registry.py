"""The estimators by name, and what they have in common.

Shapes everywhere: B batch, h heads, N queries, F frames, P tokens of a frame,
C landmarks, S samples, d head size. Frame-major means that the F*P tokens come
frame after frame.

An estimator is a module `est(q, k, v, num_frames=F)`: q [B,h,N,d] and k, v
[B,h,F*P,d] to [B,h,N,F,d], an estimate of each query's softmax attention over
the keys of each frame, with the 1/sqrt(d) scaling inside. Its constructor names
those of `GIVEN_BY_THE_MODEL` that it needs; every other argument is an option with
a default, which becomes a config key, VIT.<ESTIMATOR>.<OPTION>. Its annotation
tells the rest: Annotated[type, "what it means"], where a Literal type lists the
choices, and float | Literal["word"] a word that may stand for a number.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from slowfast_lara.attention.kernels.choice import KERNELS, missing_sizes

# What the model passes to the constructor of any estimator that asks for it: sizes,
# the dropout of attention, the seed of draws in eval mode, and whether GPUs run kernels of
# ours. `num_landmarks` is the number of landmarks C or of samples S.
GIVEN_BY_THE_MODEL = ("head_dim", "num_heads", "num_landmarks", "dropout", "seed", "kernels")

ESTIMATORS: dict[str, type[Estimator]] = {}


class Estimator(nn.Module):
    """What the registry asks of an estimator's class."""

    # It is softmax attention itself, which may count the CLS token as a key.
    exact = False
    # Its landmarks are made of tokens: there can be no more of them.
    landmarks_are_tokens = False
    # What its kernels are made for: the width of a head, and the number of samples.
    kernel_sizes: tuple[int, int] | None = None

    @property
    def without_kernel(self) -> str:
        """What of its sizes its kernels cannot do."""
        return "" if self.kernel_sizes is None else missing_sizes(*self.kernel_sizes)


@dataclass(frozen=True)
class Option:
    """An estimator's own setting: its default, its choices if listed, what it means.

    A number may also be one of some `words`.
    """

    default: Any
    choices: tuple[Any, ...] = ()
    meaning: str = ""
    words: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, or None."""
        if self.choices:
            known = ", ".join(map(str, self.choices))
            return None if value in self.choices else f"allowed: {known}"
        if value in self.words:
            return None
        if type(value) is not type(self.default):
            expected = " or ".join((f"a value of type {type(self.default).__name__}", *self.words))
            return f"{expected} is expected"
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
    """The settings of an estimator's own: arguments that the model does not give."""
    cls = estimator_class(name)
    hints = typing.get_type_hints(cls.__init__, include_extras=True)
    return {
        key: _option(parameter.default, hints.get(key))
        for key, parameter in inspect.signature(cls).parameters.items()
        if key not in GIVEN_BY_THE_MODEL
    }


def _option(default: Any, hint: Any) -> Option:
    meaning = ""
    if typing.get_origin(hint) is typing.Annotated:
        hint, meaning = typing.get_args(hint)
    parts = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)
    listed = tuple(
        choice
        for part in parts
        if typing.get_origin(part) is typing.Literal
        for choice in typing.get_args(part)
    )
    return Option(default, meaning=meaning, **{"words" if len(parts) > 1 else "choices": listed})


def build_estimator(
    name: str,
    *,
    head_dim: int,
    num_heads: int = 1,
    num_landmarks: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
    kernels: str = "auto",
    **options: Any,
) -> Estimator:
    """An estimator by name. `num_heads` 1 shares per-head samples by all heads.

    `kernels` is as kernels/choice.py says; triton is an error where there is no kernel.
    """
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
    sizes = {"head_dim": head_dim, "num_heads": num_heads, "num_landmarks": num_landmarks}
    for key, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{key} is {size!r}; a whole number of at least 1 is expected")
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; allowed: {', '.join(KERNELS)}")
    wanted = inspect.signature(ESTIMATORS[name]).parameters
    if kernels == "triton" and "kernels" not in wanted:
        raise ValueError(f"kernels='triton': there is no kernel for {name}; 'auto' does without")
    given = {**sizes, "dropout": dropout, "seed": seed, "kernels": kernels}
    built = ESTIMATORS[name](**{key: given[key] for key in wanted if key in given}, **options)
    if kernels == "triton" and built.without_kernel:
        raise ValueError(
            f"kernels='triton': there is no kernel for {built.without_kernel}; 'auto' does without"
        )
    return built


def has_kernels(name: str) -> bool:
    """Whether an estimator has kernels of its own."""
    return "kernels" in inspect.signature(estimator_class(name)).parameters
