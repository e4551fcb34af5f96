"""Reading and writing YAML configs, including the files listed under `_BASE_`.

fvcore's loader is not used: by default it executes `!!python` tags, and it does not detect a
`_BASE_` cycle.
"""

from __future__ import annotations

import math
import os
from typing import Any

import yaml

from slowfast_lara.config.shipped import find_config
from slowfast_lara.errors import ConfigError

BASE_KEY = "_BASE_"
# Limits against malicious configs in checkpoints of unknown origin. For comparison: a config with
# every key has 5,000 characters and 500 values.
MAX_CHARACTERS = 200_000
MAX_VALUES = 20_000


def read_with_bases(path: str, parents: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a YAML file and its `_BASE_` files; the file overrides its bases.

    A base is a path relative to the file, or the name of a shipped config. `parents` are the real
    paths of the files that include this file through `_BASE_`.
    """
    real = os.path.realpath(path)
    if real in parents:
        raise ConfigError(f"{path}: circular {BASE_KEY}")
    try:
        with open(path, "rb") as file:
            own = parse_yaml(file.read(MAX_CHARACTERS + 1), path)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    bases = own.pop(BASE_KEY, [])
    merged: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: {BASE_KEY} is {base!r:.80}; must be a file name")
        try:
            base_path = find_config(base, os.path.dirname(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {BASE_KEY}: {error}") from None
        _overlay(read_with_bases(base_path, (*parents, real)), merged)
    _overlay(own, merged)
    return merged


def parse_yaml(text: str | bytes, path: str) -> dict[str, Any]:
    """Parse YAML text of unknown origin, e.g. the config in a downloaded checkpoint."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{path}: config has more than {MAX_CHARACTERS} characters")
    try:
        content = yaml.load(text, _LimitedLoader)
    except Exception as error:  # PyYAML also raises other types, e.g. ValueError for `!!int x`
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} is not plain YAML: {reason:.300}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of config keys, got {content!r:.40}")
    return content or {}


class _LimitedLoader(yaml.SafeLoader):
    """Rejects more than MAX_VALUES values after alias expansion, huge and base-60 integers."""

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        if root is not None and _expanded_size(root, {}) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values after expanding aliases")
        return root

    def construct_yaml_int(self, node: yaml.Node) -> int:
        if ":" in str(node.value):  # YAML 1.1 reads 2:4 as 2 * 60 + 4
            raise ValueError(f"{node.value!r:.40} is no number; put text in quotes")
        number: int = super().construct_yaml_int(node)
        # An error message cannot quote huge integers: str() fails above 4300 digits.
        if number.bit_length() > 63:
            raise ValueError(f"an integer has {number.bit_length()} bits; at most 63 are allowed")
        return number


_LimitedLoader.add_constructor("tag:yaml.org,2002:int", _LimitedLoader.construct_yaml_int)


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """Number of values in a node after alias expansion; infinite if the node contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # returned if a descendant refers to this node
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        known[id(node)] = 1 + sum(_expanded_size(child, known) for child in children)
    return known[id(node)]


def _overlay(top: dict[str, Any], bottom: dict[str, Any]) -> None:
    """Merge `top` into `bottom`; copy mappings, because YAML aliases refer to the same object."""
    for key, value in top.items():
        if isinstance(value, dict):
            if not isinstance(bottom.get(key), dict):
                bottom[key] = {}
            _overlay(value, bottom[key])
        else:
            bottom[key] = value


class _Dumper(yaml.SafeDumper):
    """Writes one key per line, and lists as [a, b]."""


_Dumper.add_representer(
    list, lambda dumper, x: dumper.represent_sequence("tag:yaml.org,2002:seq", x, flow_style=True)
)


def standalone(name_or_path: str) -> str:
    """The YAML text of a config with its `_BASE_` files merged in."""
    path = find_config(name_or_path)
    return f"# {name_or_path}, merged with its base configs.\n" + to_yaml(read_with_bases(path))


def to_yaml(tree: dict[str, Any]) -> str:
    """A config's mapping as YAML text."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
