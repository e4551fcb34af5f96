"""Loading of configs from YAML files and overrides; the results are frozen and validated."""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.config.defaults import get_cfg, walk
from slowfast_lara.config.keys import Key, all_keys, get_value, set_value
from slowfast_lara.config.shipped import find_config
from slowfast_lara.config.validate import validate
from slowfast_lara.config.yaml_files import parse_yaml, read_with_bases
from slowfast_lara.data import DATASETS
from slowfast_lara.errors import ConfigError
from slowfast_lara.user_code import OWN_CODE, VARIABLE, import_user_code, imported

# Keys of other PySlowFast versions and of Motionformer -> the keys that replace them here.
REPLACED_KEYS = {
    "AUG": "DATA.RE_PROB, DATA.USE_REPEATED_AUG, DATA.USE_RAND_AUGMENT and DATA.COLORJITTER",
    "MIXUP.LABEL_SMOOTH_VALUE": "SOLVER.SMOOTHING",
    "MIXUP.MIXUP_ALPHA": "MIXUP.ALPHA, with MIXUP.ENABLE True",
    "MIXUP.MIXUP_PROB": "MIXUP.PROB",
    "MIXUP.MIXUP_SWITCH_PROB": "MIXUP.SWITCH_PROB",
    "SOLVER.CLIP_GRAD_L2NORM": "SOLVER.CLIP_GRAD",
    "TRAIN.MIXED_PRECISION": "SOLVER.USE_MIXED_PRECISION",
}
# KEY, VALUE, KEY, VALUE, ... or {KEY: VALUE}
Overrides = Sequence[Any] | Mapping[str, Any]
_TYPE_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    list: "a list",
    bool: "True or False",
    type(None): "a number or None",
}


def load_config(cfg_file: str | os.PathLike[str], opts: Overrides = ()) -> CfgNode:
    """Load a config file and apply overrides.

    Args:
        cfg_file: Path of a YAML file, or the name of a shipped config such as `quick/lara`.
        opts: Overrides as a mapping {KEY: VALUE}, or as a flat sequence KEY, VALUE, KEY, VALUE, ...

    Returns:
        The frozen, validated config.
    """
    return config_of(read_with_bases(find_config(cfg_file)), os.fspath(cfg_file), opts)


def config_of(tree: dict[str, Any], where: str, opts: Overrides = ()) -> CfgNode:
    """The default config updated with `tree` from file `where`, then with `opts`; frozen, valid."""
    import_user_code()
    cfg = get_cfg()
    _merge(_without_user_code(tree, where), cfg, all_keys(), "", f" in {where}")
    cfg.IMPORTS = imported()
    return with_overrides(cfg, opts)


def _without_user_code(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """Drop IMPORTS and the options of unregistered attentions from a config with IMPORTS.

    Raises ConfigError if a config with IMPORTS uses an attention or dataset that is not registered.
    """
    imports = tree.get("IMPORTS")
    if not imports:
        return tree
    datasets = {name.lower() for name, _ in DATASETS}
    known = {"VIT.APPROX_ATTN_TYPE": {"none", *ESTIMATORS}}
    for key, names in {**known, "TRAIN.DATASET": datasets, "TEST.DATASET": datasets}.items():
        with contextlib.suppress(KeyError):
            value = get_value(tree, key)
            if value not in names and str(value).lower() not in names:
                modules = imports if isinstance(imports, list) else [imports]
                flags = " ".join(f"--import {module}" for module in modules)
                raise ConfigError(
                    f"{key} is {value!r:.80} in {where}; this name is not part of slowfast_lara: "
                    f"add {flags:.300} to the command, as for the original run (in Python, import "
                    f"the module first, or set {VARIABLE})"
                )
    known_nodes = {name.upper() for name in ESTIMATORS}
    tree = {key: value for key, value in tree.items() if key != "IMPORTS"}
    if isinstance(vit := tree.get("VIT"), dict):
        tree["VIT"] = {
            name: value
            for name, value in vit.items()
            if not isinstance(value, dict) or name in known_nodes
        }
    return tree


def override_pairs(opts: Overrides) -> list[tuple[str, Any]]:
    """Convert overrides to (KEY, VALUE) pairs; raise ConfigError if their form is invalid."""
    pairs: list[tuple[str, Any]] = []
    left: list[Any] = []  # a key without a value
    if isinstance(opts, Mapping):
        pairs = list(_flat(opts))
    elif isinstance(opts, (list, tuple)):
        pairs, left = list(zip(opts[::2], opts[1::2])), [*opts[len(opts) & ~1 :]]
    keys = [*(key for key, _ in pairs), *left]
    if not isinstance(opts, (Mapping, list, tuple)) or {*map(type, keys)} - {str}:
        form = "must be a mapping {KEY: VALUE} or a list KEY, VALUE, KEY, VALUE, ..."
        raise ConfigError(f"overrides are {opts!r:.80}; {form}")
    for key in keys:
        name, equals, value = key.partition("=")
        if equals:
            raise ConfigError(f"{key!r:.80} has an equals sign; write {name} {value or 'VALUE'}")
    if left:
        raise ConfigError(f"expected KEY VALUE pairs; {left[0]!r:.80} has no value")
    return pairs


def _flat(tree: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The (dotted key, value) pairs of a nested mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", item) for name, item in _flat(value))
        else:
            yield key, value


def with_overrides(cfg: CfgNode, opts: Overrides) -> CfgNode:
    """A frozen, validated copy of a config with overrides."""
    pairs = override_pairs(opts)
    cfg = cfg.clone()
    cfg.defrost()
    known = all_keys()
    for key, value in pairs:
        tree: dict[str, Any] = {}
        set_value(tree, key, value)
        _merge(tree, cfg, known, "", "")
    validate(cfg)
    cfg.freeze()
    return cfg


def _merge(
    tree: dict[Any, Any], node: CfgNode, known: dict[str, Key], prefix: str, where: str
) -> None:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in node:
            is_option = prefix == "VIT." and isinstance(value, dict)
            hint = _attention_hint(name) if is_option else _suggestion(key)
            raise ConfigError(f"unknown config key {key:.80}{where}{hint}")
        if isinstance(node[name], CfgNode):
            if not isinstance(value, dict):
                expected = f"must be a mapping with the keys {', '.join(node[name])}"
                raise ConfigError(f"{key}{where} is {value!r:.80}; {expected}")
            _merge(value, node[name], known, key + ".", where)
        else:
            entry = known.get(key)
            typical = node[name] if entry is None or entry.default is ... else entry.default
            words = getattr(entry.allowed, "words", ()) if entry else ()
            node[name] = _convert(value, typical, words, key + where)


def _suggestion(key: str) -> str:
    if key in REPLACED_KEYS:
        return f"; use {REPLACED_KEYS[key]}"
    near = difflib.get_close_matches(key, dict(walk(get_cfg())), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _attention_hint(node: str) -> str:
    """Hint for options of an unknown attention: a similar name, or how to import user code."""
    near = difflib.get_close_matches(node, [name.upper() for name in ESTIMATORS], n=1)
    return f"; did you mean VIT.{near[0]}?" if near else f"; {OWN_CODE}"


def _parse(text: str) -> Any:
    """Parse a Python literal, or a YAML boolean, null or list; return other text unchanged."""
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        return ast.literal_eval(text)
    with contextlib.suppress(ConfigError):
        value = parse_yaml(f"value: {text}", "an override")["value"]
        # Do not accept YAML's numbers: YAML reads 010 as 8 and 1:30 as 90.
        return value if value is None or isinstance(value, (bool, list)) else text
    return text


def _convert(value: Any, typical: Any, words: Collection[str], where: str) -> Any:
    """Convert `value` to the type of `typical`; raise ConfigError if the types do not fit.

    A value in `words` is returned unchanged: some keys accept a word in place of a number.
    """
    if value in words:
        return value
    if isinstance(value, str) and not isinstance(typical, str):
        # Values from YAML files may be strings, too: PyYAML parses 1e-4 as a string.
        value = _parse(value)
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{where} is an integer of more than 63 bits")
    if typical is None and type(value) in (int, float, type(None)):
        return value
    if isinstance(typical, list) and isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(typical, str) and not isinstance(value, (str, dict, list, tuple)):
        return "" if value is None else str(value)
    if isinstance(typical, float) and type(value) is int:
        return float(value)
    if type(value) is not type(typical):
        expected = " or ".join((_TYPE_NAMES[type(typical)], *words))
        raise ConfigError(f"{where} is {value!r:.80}; must be {expected}")
    return value
