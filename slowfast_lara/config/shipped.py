"""The configs that come with the package, by name: K400/lara_224_16x4, quick/lara."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from slowfast_lara.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL = _PACKAGE / "shipped_configs"


def shipped_folder() -> Path:
    """configs/ of the checkout, or its copy in an installed package."""
    return _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "configs"


def shipped_names() -> list[str]:
    """The names of all shipped configs, without those that are only bases of others."""
    folder = shipped_folder()
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    return sorted(name for name in names if not name.endswith(("/base", "/paper")))


def find_config(name_or_path: str | os.PathLike[str]) -> str:
    """The file that is meant: a path, or else the name of a shipped config."""
    given = os.fspath(name_or_path)
    if os.path.exists(given):
        return given
    path = shipped_folder() / (given if given.endswith(".yaml") else f"{given}.yaml")
    if path.is_file():
        return str(path)
    names = shipped_names()
    near = difflib.get_close_matches(given.removesuffix(".yaml"), names, n=4, cutoff=0.4)
    hint = (
        f"near ones: {', '.join(near)}"
        if near
        else "`slowfast-lara configs` lists the shipped ones"
    )
    raise ConfigError(f"no config file {given}, and no shipped config of this name; {hint}")
