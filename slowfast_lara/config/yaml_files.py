"""Config files: plain YAML, over the files that their `_BASE_` names.

YAML is read safely only: fvcore's own loader falls back to running the file's
`!!python` tags unless told not to, and follows a `_BASE_` cycle for ever. Files are
small, and so is what their aliases stand for: ten lines of aliases of aliases can mean
more values than a memory holds.
"""

from __future__ import annotations

import math
import os
from typing import Any

import yaml

from slowfast_lara.errors import ConfigError

BASE_KEY = "_BASE_"
# The longest config of ours, with every key, has 5,000 characters and 500 values.
MOST_CHARACTERS = 200_000
MOST_VALUES = 20_000


def read_with_bases(path: str) -> dict[str, Any]:
    """The mapping in a YAML file, over those of its `_BASE_` files."""
    return _over_bases(path, (), {})


def _over_bases(
    path: str, seen: tuple[str, ...], known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """`seen`: the files on the way here. `known`: what was read, as bases may share theirs."""
    real = os.path.realpath(path)
    if real in known:
        return known[real]
    if real in seen:
        raise ConfigError(f"{path}: {BASE_KEY} files refer to each other in a circle")
    own = _read_yaml(path)
    bases = own.pop(BASE_KEY, [])
    merged: dict[str, Any] = {}
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: {BASE_KEY} is {base!r:.80}; a file name is expected")
        base_path = os.path.join(os.path.dirname(path), os.path.expanduser(base))
        _overlay(_over_bases(base_path, (*seen, real), known), merged)
    _overlay(own, merged)
    known[real] = merged
    return merged


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not plain YAML: {error}") from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: str) -> dict[str, Any]:
    """The mapping that the text of a config file holds."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{path}: a config of at most {MOST_CHARACTERS} characters is expected")
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if _values_of(root, {}) > MOST_VALUES:
            raise ConfigError(f"{path}: its aliases stand for more than {MOST_VALUES} values")
        content = loader.construct_document(root)
    except ConfigError:
        raise
    except Exception as error:  # PyYAML's constructors raise anything on `!!int x` and the like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{path} is not plain YAML: {reason:.300}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a mapping of config keys is expected, not {content!r:.40}")
    return content


class _Loader(yaml.SafeLoader):
    """Plain values only, and whole numbers of at most 64 bits."""

    def construct_yaml_int(self, node: yaml.Node) -> int:
        number: int = super().construct_yaml_int(node)
        if number.bit_length() > 63:  # Python does not even print those of thousands of digits
            raise ValueError(f"a whole number has {number.bit_length()} bits; 63 are allowed")
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _values_of(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node stands for, those of an alias counted each time."""
    if id(node) not in known:
        known[id(node)] = math.inf  # a node that is met within itself has no end
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        known[id(node)] = 1 + sum(_values_of(part, known) for part in parts)
    return known[id(node)]


def _overlay(top: dict[str, Any], bottom: dict[str, Any]) -> None:
    """Values of `top` into `bottom`; mappings are copied, as an alias may stand for one twice."""
    for key, value in top.items():
        if isinstance(value, dict):
            if not isinstance(bottom.get(key), dict):
                bottom[key] = {}
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
