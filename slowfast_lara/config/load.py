"""From a YAML file and overrides to a frozen, validated config.

YAML is read safely only: fvcore's own loader falls back to running the file's
`!!python` tags unless told not to, and follows a `_BASE_` cycle for ever.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
from collections.abc import Sequence
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from slowfast_lara.config.defaults import get_cfg
from slowfast_lara.config.shipped import find_config
from slowfast_lara.config.validate import validate
from slowfast_lara.errors import ConfigError

BASE_KEY = "_BASE_"


def load_config(cfg_file: str | os.PathLike[str], opts: Sequence[Any] = ()) -> CfgNode:
    """The config of a YAML file or of a shipped name, with KEY VALUE pairs `opts` laid over it."""
    cfg = get_cfg()
    _merge(_read_with_bases(find_config(cfg_file), ()), cfg, "", f" in {cfg_file}")
    _merge_opts(opts, cfg)
    validate(cfg)
    cfg.freeze()
    return cfg


def _read_with_bases(path: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The mapping in a YAML file, over those of its `_BASE_` files."""
    if os.path.realpath(path) in seen:
        raise ConfigError(f"{path}: {BASE_KEY} files refer to each other in a circle")
    own = _read_yaml(path)
    bases = own.pop(BASE_KEY, [])
    merged: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: {BASE_KEY} is {base!r}; a file name is expected")
        base_path = os.path.join(os.path.dirname(path), os.path.expanduser(base))
        _overlay(_read_with_bases(base_path, (*seen, os.path.realpath(path))), merged)
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


def _merge_opts(opts: Sequence[Any], cfg: CfgNode) -> None:
    if len(opts) % 2:
        raise ConfigError(f"overrides come as KEY VALUE pairs; {opts[-1]!r} has no value")
    for full_key, value in zip(opts[::2], opts[1::2]):
        tree: Any = value
        for part in reversed(str(full_key).split(".")):
            tree = {part: tree}
        _merge(tree, cfg, "", "")


def _merge(tree: dict[Any, Any], node: CfgNode, prefix: str, where: str) -> None:
    for key, value in tree.items():
        full_key = f"{prefix}{key}"
        if key not in node:
            raise ConfigError(f"unknown config key {full_key}{where}{_nearest(full_key)}")
        if isinstance(node[key], CfgNode):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{full_key}{where} is {value!r}; it holds keys: {', '.join(node[key])}"
                )
            _merge(value, node[key], full_key + ".", where)
        else:
            node[key] = _coerce(value, node[key], full_key, where)


def _nearest(full_key: str) -> str:
    known = list(_all_keys(get_cfg(), ""))
    near = difflib.get_close_matches(full_key, known, n=1, cutoff=0.5)
    if not near:  # the right name under another node
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        tail = difflib.get_close_matches(full_key.rsplit(".", 1)[-1], tails, n=1)
        near = [tails[tail[0]]] if tail else []
    return f"; did you mean {near[0]}?" if near else ""


def _all_keys(node: CfgNode, prefix: str):
    for key, value in node.items():
        yield prefix + key
        if isinstance(value, CfgNode):
            yield from _all_keys(value, f"{prefix}{key}.")


def _coerce(value: Any, default: Any, full_key: str, where: str) -> Any:
    """`value` in the type of `default`, if that loses nothing."""
    if isinstance(value, str) and not isinstance(default, str):
        # Also from YAML, where 1e-4 is a string.
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    if default is None:  # a number that may be left out
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return value
        raise ConfigError(f"{full_key}{where} is {value!r}; a number or None is expected")
    if isinstance(default, list) and isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(default, str) and not isinstance(value, (str, dict, list, tuple)):
        return "" if value is None else str(value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        kind = {"str": "text", "int": "a whole number", "float": "a number", "list": "a list"}
        name = type(default).__name__
        expected = kind.get(name, "True or False")
        raise ConfigError(f"{full_key}{where} is {value!r}; {expected} is expected")
    return value
