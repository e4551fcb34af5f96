"""Shipped configs by name, such as K400/lara_224_16x4 or quick/lara."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from slowfast_lara.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL = _PACKAGE / "shipped_configs"


def shipped_folder() -> Path:
    """The folder configs/ of the repository, or its copy in an installed package."""
    return _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "configs"


def shipped_names() -> list[str]:
    """The sorted names of all shipped configs, except files that serve only as a `_BASE_`."""
    return sorted(name for name in _files() if not name.endswith(("/base", "/paper", "/best")))


def find_config(name_or_path: str | os.PathLike[str], folder: str = "") -> str:
    """The path of a config file, given its path relative to `folder` or a shipped config's name."""
    given = os.fspath(name_or_path)
    path = os.path.join(folder, os.path.expanduser(given))
    if os.path.isfile(path):
        return path
    files, name = _files(), given.removesuffix(".yaml")
    if name in files:
        return str(files[name])
    if os.path.exists(path):  # a folder, pipe, ...: the caller raises an error
        return path
    parent, here = os.path.dirname(path), os.path.dirname(given)
    siblings = os.listdir(parent or ".") if os.path.isdir(parent or ".") else []
    own = [os.path.join(here, file) for file in siblings if file.endswith((".yaml", ".yml"))]
    near = difflib.get_close_matches(given, own, n=1, cutoff=0.7)
    near += difflib.get_close_matches(name, shipped_names(), n=4 - len(near), cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "see `slowfast-lara configs`"
    raise ConfigError(f"no config file {path}, and no shipped config of this name; {hint}")


def description(name: str) -> str:
    """The description of a shipped config: the comment in the first line of its file."""
    with open(_files()[name], encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def _files() -> dict[str, Path]:
    folder = shipped_folder()
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")
    }
