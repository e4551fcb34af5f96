"""What is imported only when it is asked for: names of a package, optional requirements."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from slowfast_lara.errors import InputError


def names_from(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names live in these modules."""

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


def check_installed(package: str, extra: str) -> None:
    """Refuse to go on without a package that only an extra of ours installs."""
    try:
        importlib.import_module(package)
    except ImportError:
        raise InputError(
            f"the package {package} is needed for this; pip install 'slowfast_lara[{extra}]'"
        ) from None
