"""Config files: plain YAML, over the files that their `_BASE_` names.

YAML is read safely only: fvcore's own loader falls back to running the file's
`!!python` tags unless told not to, and follows a `_BASE_` cycle for ever.
"""

from __future__ import annotations

import os
from typing import Any

import yaml

from slowfast_lara.errors import ConfigError

BASE_KEY = "_BASE_"


def read_with_bases(path: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mapping in a YAML file, over those of its `_BASE_` files (`seen` is on the way here)."""
    if os.path.realpath(path) in seen:
        raise ConfigError(f"{path}: {BASE_KEY} files refer to each other in a circle")
    own = _read_yaml(path)
    bases = own.pop(BASE_KEY, [])
    merged: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: {BASE_KEY} is {base!r}; a file name is expected")
        base_path = os.path.join(os.path.dirname(path), os.path.expanduser(base))
        _overlay(read_with_bases(base_path, (*seen, os.path.realpath(path))), merged)
    _overlay(own, merged)
    return merged


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not plain YAML: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a mapping of config keys is expected, not {content!r:.40}")
    return content


def _overlay(top: dict[str, Any], bottom: dict[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(bottom.get(key), dict):
            _overlay(value, bottom[key])
        else:
            bottom[key] = value


class _Dumper(yaml.SafeDumper):
    """A key a line, as the shipped files are written; lists as [a, b]."""


_Dumper.add_representer(
    list,
    lambda dumper, values: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", values, flow_style=True
    ),
)


def to_yaml(tree: dict[str, Any]) -> str:
    """A config's mapping as the text of a file."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
