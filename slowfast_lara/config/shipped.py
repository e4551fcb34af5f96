"""Shipped configs by name, such as K400/lara_224_16x4 or quick/lara."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from slowfast_lara.config.yaml_files import read_with_bases, to_yaml
from slowfast_lara.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL = _PACKAGE / "shipped_configs"


def shipped_folder() -> Path:
    """The folder configs/ of the repository, or its copy in an installed package."""
    return _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "configs"


def shipped_names() -> list[str]:
    """The sorted names of all shipped configs, except files that serve only as a `_BASE_`."""
    return sorted(name for name in _files() if not name.endswith(("/base", "/paper", "/best")))


def find_config(name_or_path: str | os.PathLike[str]) -> str:
    """The path of a config file, given its path or the name of a shipped config."""
    given = os.fspath(name_or_path)
    if os.path.isfile(given):
        return given
    files, name = _files(), given.removesuffix(".yaml")
    if name in files:
        return str(files[name])
    if os.path.exists(given):  # a folder: the error is raised when it is read
        return given
    near = difflib.get_close_matches(name, shipped_names(), n=4, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "`slowfast-lara configs` lists them"
    raise ConfigError(f"no config file {given}, and no shipped config of this name; {hint}")


def description(name: str) -> str:
    """The description of a shipped config: the comment in the first line of its file."""
    with open(_files()[name], encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def standalone(name_or_path: str) -> str:
    """The YAML text of a config with its `_BASE_` files merged in."""
    path = find_config(name_or_path)
    return f"# {name_or_path}, merged with its base configs.\n" + to_yaml(read_with_bases(path))


def _files() -> dict[str, Path]:
    folder = shipped_folder()
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")
    }
