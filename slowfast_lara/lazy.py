"""Lazy imports: package attributes and optional requirements."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from slowfast_lara.errors import InputError


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build the `__getattr__` and `__dir__` of a package.

    `__getattr__` imports each name from its module on first use. `__dir__` lists the `__all__` of
    the package, for tab completion.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sys.modules[package].__all__


def check_installed(package: str, extra: str) -> None:
    """Raise InputError if `package`, a requirement of the optional `extra`, is not installed."""
    try:
        importlib.import_module(package)
    except ImportError:
        raise InputError(
            f"package {package} is not installed; pip install 'slowfast_lara[{extra}]'"
        ) from None
