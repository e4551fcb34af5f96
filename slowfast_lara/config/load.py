"""From a YAML file and overrides to a frozen, validated config."""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.defaults import get_cfg, walk
from slowfast_lara.config.keys import Key, all_keys
from slowfast_lara.config.shipped import find_config
from slowfast_lara.config.validate import validate
from slowfast_lara.config.yaml_files import read_with_bases
from slowfast_lara.errors import ConfigError

# Python reads and prints whole numbers of up to 4,300 digits only.
LONGEST_LITERAL = 1000
# What other versions of PySlowFast, and Motionformer, call otherwise or keep elsewhere.
CALLED_HERE = {
    "AUG": "DATA.RE_PROB, DATA.USE_REPEATED_AUG, DATA.USE_RAND_AUGMENT and DATA.COLORJITTER",
    "MIXUP.LABEL_SMOOTH_VALUE": "SOLVER.SMOOTHING",
    "MIXUP.MIXUP_ALPHA": "MIXUP.ALPHA, with MIXUP.ENABLE True",
    "MIXUP.MIXUP_PROB": "MIXUP.PROB",
    "MIXUP.MIXUP_SWITCH_PROB": "MIXUP.SWITCH_PROB",
    "SOLVER.CLIP_GRAD_L2NORM": "SOLVER.CLIP_GRAD",
    "TRAIN.MIXED_PRECISION": "SOLVER.USE_MIXED_PRECISION",
}


def load_config(cfg_file: str | os.PathLike[str], opts: Sequence[Any] = ()) -> CfgNode:
    """The config of a YAML file or of a shipped name, with KEY VALUE pairs `opts` laid over it."""
    return config_of(read_with_bases(find_config(cfg_file)), os.fspath(cfg_file), opts)


def config_of(tree: dict[str, Any], where: str, opts: Sequence[Any] = ()) -> CfgNode:
    """The config of a mapping that was read from `where`, with `opts` laid over it."""
    cfg = get_cfg()
    _merge(tree, cfg, all_keys(), "", f" in {where}")
    return with_overrides(cfg, opts)


def with_overrides(cfg: CfgNode, opts: Sequence[Any]) -> CfgNode:
    """A frozen, validated copy of a config, with KEY VALUE pairs laid over it."""
    cfg = cfg.clone()
    cfg.defrost()
    _merge_opts(opts, cfg, all_keys())
    validate(cfg)
    cfg.freeze()
    return cfg


def _merge_opts(opts: Sequence[Any], cfg: CfgNode, known: dict[str, Key]) -> None:
    if len(opts) % 2:
        raise ConfigError(f"overrides come as KEY VALUE pairs; {opts[-1]!r:.80} has no value")
    for full_key, value in zip(opts[::2], opts[1::2]):
        tree: Any = value
        for part in reversed(str(full_key).split(".")):
            tree = {part: tree}
        _merge(tree, cfg, known, "", "")


def _merge(
    tree: dict[Any, Any], node: CfgNode, known: dict[str, Key], prefix: str, where: str
) -> None:
    for key, value in tree.items():
        full_key = f"{prefix}{key}"
        if key not in node:
            raise ConfigError(f"unknown config key {full_key:.80}{where}{_nearest(full_key)}")
        if isinstance(node[key], CfgNode):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{full_key}{where} is {value!r:.80}; it holds keys: {', '.join(node[key])}"
                )
            _merge(value, node[key], known, full_key + ".", where)
        elif full_key in known and known[full_key].words:
            node[key] = _number_or_word(value, known[full_key], full_key, where)
        else:
            node[key] = _coerce(value, node[key], full_key, where)


def _number_or_word(value: Any, known: Key, full_key: str, where: str) -> Any:
    if value in known.words:
        return value
    try:
        return _coerce(value, known.default, full_key, where)
    except ConfigError as problem:
        raise ConfigError(f"{problem}, or one of: {', '.join(known.words)}") from None


def _nearest(full_key: str) -> str:
    if full_key in CALLED_HERE:
        return f"; here it is {CALLED_HERE[full_key]}"
    known = [key for key, _ in walk(get_cfg())]
    near = difflib.get_close_matches(full_key, known, n=1, cutoff=0.5)
    if not near:  # the right name under another node
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        tail = difflib.get_close_matches(full_key.rsplit(".", 1)[-1], tails, n=1)
        near = [tails[tail[0]]] if tail else []
    return f"; did you mean {near[0]}?" if near else ""


def _coerce(value: Any, default: Any, full_key: str, where: str) -> Any:
    """`value` in the type of `default`, if that loses nothing."""
    is_literal = isinstance(value, str) and len(value) <= LONGEST_LITERAL
    if is_literal and not isinstance(default, str):
        # Also from YAML, where 1e-4 is a string.
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    if isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{full_key}{where} is {value}; a number of at most 63 bits is expected")
    if default is None:  # a number that may be left out
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return value
        raise ConfigError(f"{full_key}{where} is {value!r:.80}; a number or None is expected")
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
        raise ConfigError(f"{full_key}{where} is {value!r:.80}; {expected} is expected")
    return value
