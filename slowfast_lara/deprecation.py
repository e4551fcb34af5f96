"""Deprecation warnings for renamed public names and config keys.

Policy: a deprecated public name works for two minor versions after the release that deprecates
it. A name deprecated in 0.2 works in 0.3 and 0.4 and is removed in 0.5.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


@functools.cache  # once per name and process
def warn_deprecated(old: str, new: str, removed_in: str) -> None:
    """Warn about a name, module or config key; the warning points to the caller's caller."""
    message = f"{old} is deprecated and will be removed in {removed_in}; use {new}"
    warnings.warn(message, FutureWarning, stacklevel=3)


def deprecated(
    old: str, new: str, removed_in: str
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function that is kept under its old name."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            warn_deprecated(old, new, removed_in)
            return function(*args, **kwargs)

        return wrapper

    return decorate
