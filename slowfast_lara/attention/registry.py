"""Registry of the estimators, and their common base class.

Shapes in all modules: B batch, h heads, N queries, F frames, P tokens of a frame, C landmarks, S
samples, d head size. Frame-major tokens [F*P] are ordered by frame first, then by position.

An estimator is a module, called as `est(q, k, v, num_frames=F)` with q [B,h,N,d] and k, v
[B,h,F*P,d]. It returns [B,h,N,F,d], an estimate of each query's softmax attention over the keys of
each frame. It scales the logits by 1/sqrt(d) itself.

The model passes the constructor arguments in `MODEL_ARGUMENTS`. Every other argument is an option:
it must have a default, and it becomes the config key VIT.<ESTIMATOR>.<OPTION>. The annotation
Annotated[type, "meaning"] documents the option. A Literal type lists the allowed values;
float | Literal["word"] allows a number or this string.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from slowfast_lara.attention.kernels import choice
from slowfast_lara.attention.kernels.choice import KERNELS, Kernels, unsupported_sizes

# Constructor arguments that the model passes to every estimator that has them.
MODEL_ARGUMENTS = ("head_dim", "num_heads", "num_landmarks", "dropout", "seed", "kernels")

ESTIMATORS: dict[str, type[Estimator]] = {}


class Estimator(nn.Module):
    """Base class of the estimators."""

    # Whether this is exact softmax attention. In joint and divided layers (models/space_time.py),
    # the CLS token is a key of the patches only if this is True.
    exact = False
    # True if landmarks are tokens or means of tokens, so that C is at most the number of tokens.
    landmarks_are_tokens = False
    # True if `num_landmarks` is the number of keys or groups of keys per frame, not per clip.
    # Such an estimator is exact if a frame has at most `num_landmarks` keys.
    counts_keys_of_a_frame = False
    # Head size and number of samples that `unsupported` checks; None for estimators without Triton
    # kernels, and for those that override `unsupported`.
    kernel_sizes: tuple[int, int] | None = None
    # The constructor argument `kernels`; "torch" for estimators without Triton kernels.
    kernels: Kernels = "torch"
    name = ""  # key in ESTIMATORS; set by `register`
    # Constructor arguments; set by `build_estimator`.
    settings: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        return f"{type(self).__name__}({settings})"

    def unsupported(self, keys: int = 0) -> str:
        """Description of a size that the Triton kernels do not support, "" if none.

        `keys` is the number of keys per frame; with 0 (unknown), it is not checked.
        """
        return "" if self.kernel_sizes is None else unsupported_sizes(*self.kernel_sizes)

    def chosen_kernels(self, q: Tensor, k: Tensor, v: Tensor, num_frames: int) -> Kernels:
        """Kernels for these inputs: "triton" or "torch"."""
        options = {key: x for key, x in self.settings.items() if key not in ("seed", "kernels")}
        options["num_frames"] = num_frames
        unsupported = self.unsupported()
        if k.shape != v.shape:
            unsupported = unsupported or "values with a shape different from the keys'"
        tensors = (q, k, v)
        triton = choice.uses_triton(self.kernels, self.name, tensors, options, unsupported)
        return "triton" if triton else "torch"


class LandmarkEstimator(Estimator):
    """Base class of the estimators whose only argument is `num_landmarks`."""

    def __init__(self, *, num_landmarks: int) -> None:
        super().__init__()
        self.num_landmarks = num_landmarks


@dataclass(frozen=True)
class Option:
    """An option of an estimator.

    If `choices` is not empty, it lists the allowed values. If `words` is not empty, the option is a
    number or one of these strings.
    """

    default: Any
    choices: tuple[Any, ...] = ()
    meaning: str = ""
    words: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """Error message "must be ..." if a value is not allowed, otherwise None."""
        if self.choices:
            return None if value in self.choices else f"must be one of {_joined(self.choices)}"
        if value in self.words:
            return None
        if type(value) is not type(self.default):
            return f"must be {' or '.join((type(self.default).__name__, *self.words))}"
        if type(value) is int and value < 1:
            return "must be at least 1"
        if type(value) is float and not 0 <= value < float("inf"):
            return "must be a finite number of at least 0"
        return None


def register(name: str) -> Callable[[type[Estimator]], type[Estimator]]:
    """Return a class decorator that adds an estimator to the registry.

    A user's class may be registered again, e.g. by a notebook cell that runs twice.
    """

    def add(cls: type[Estimator]) -> type[Estimator]:
        if not name.isidentifier():  # the name becomes part of config keys
            raise ValueError(f"name of estimator is {name!r}; must be an identifier")
        old = ESTIMATORS.get(name)
        is_own = old is not None and not old.__module__.startswith("slowfast_lara.")
        if old is not None and not (is_own and old.__qualname__ == cls.__qualname__):
            raise ValueError(f"estimator {name!r} is already registered; choose another name")
        for key, parameter in inspect.signature(cls).parameters.items():
            if key not in MODEL_ARGUMENTS and parameter.default is parameter.empty:
                raise ValueError(f"option {key} of {name} has no default; options need one")
        ESTIMATORS[name], cls.name = cls, name
        return cls

    return add


def estimator_class(name: str) -> type[Estimator]:
    if name not in ESTIMATORS:
        raise ValueError(f"estimator is {name!r}; must be one of {_joined(ESTIMATORS)}")
    return ESTIMATORS[name]


def has_kernels(name: str) -> bool:
    """Whether an estimator has Triton kernels."""
    return "kernels" in inspect.signature(estimator_class(name)).parameters


def estimator_options(name: str) -> dict[str, Option]:
    """The options of an estimator: constructor arguments that the model does not pass."""
    cls = estimator_class(name)
    hints = get_type_hints(cls.__init__, include_extras=True)
    return {
        key: _option(parameter.default, hints.get(key))
        for key, parameter in inspect.signature(cls).parameters.items()
        if key not in MODEL_ARGUMENTS
    }


def _option(default: Any, hint: Any) -> Option:
    meaning = ""
    if get_origin(hint) is Annotated:
        hint, meaning = get_args(hint)
    parts = get_args(hint) if get_origin(hint) is Union else (hint,)
    literals = tuple(x for part in parts if get_origin(part) is Literal for x in get_args(part))
    return Option(default, meaning=meaning, **{"words" if len(parts) > 1 else "choices": literals})


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
    """Build an estimator by name.

    Args:
        name: a key of ESTIMATORS.
        head_dim: head size d.
        num_heads: number of heads with samples of their own; 1: all heads use the same samples
            (Performer only).
        num_landmarks: number of landmarks C per clip. For Performer: number of samples S. For
            estimators with `counts_keys_of_a_frame`: number of keys or groups of keys per frame.
        dropout: dropout probability of the attention weights (exact attention only).
        seed: seed of the random draws in eval mode (Performer and RA).
        kernels: "auto", "torch" or "triton" (kernels/choice.py).
        options: options of this estimator, as listed by `estimator_options`.

    Raises:
        ValueError: a name or value is invalid, or kernels="triton" does not support the estimator
            or its sizes.
        TypeError: an option is unknown.
    """
    known = estimator_options(name)
    for key, value in options.items():
        if key not in known:
            raise TypeError(f"unknown option {key!r} of {name}; its options: {_joined(known)}")
        if type(known[key].default) is float and type(value) is int:
            options[key] = value = float(value)
        problem = known[key].problem(value)
        if problem:
            raise ValueError(f"option {key} of {name} is {value!r}; {problem}")
    sizes = {"head_dim": head_dim, "num_heads": num_heads, "num_landmarks": num_landmarks}
    for key, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{key} is {size!r}; must be an integer of at least 1")
    if kernels not in KERNELS:
        raise ValueError(f"kernels is {kernels!r}; must be one of {_joined(KERNELS)}")
    arguments = {**sizes, "dropout": dropout, "seed": seed, "kernels": kernels}
    wanted = inspect.signature(ESTIMATORS[name]).parameters
    arguments = {key: value for key, value in arguments.items() if key in wanted}
    estimator = ESTIMATORS[name](**arguments, **options)
    defaults = {key: option.default for key, option in known.items()}
    settings = {**arguments, **defaults, **options}
    estimator.settings = {key: settings[key] for key in wanted}  # in signature order
    unsupported = estimator.unsupported() if "kernels" in wanted else name
    if kernels == "triton" and unsupported:
        raise ValueError(f"kernels='triton' does not support {unsupported}; use 'auto' or 'torch'")
    return estimator


def _joined(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "(none)"
