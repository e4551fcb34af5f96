"""docs/config.md: every config key with its default and meaning, as Markdown."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.defaults import get_cfg, walk
from slowfast_lara.config.keys import Key, all_keys

HEAD = """\
# Every config key

A key is set in a YAML file or, as `KEY VALUE`, on the command line. This page is made by
`slowfast-lara configs --reference --out docs/config.md --force`, from the table in
`slowfast_lara/config/keys.py` and the signatures of the estimators."""
UNUSED = """
## PySlowFast's, not used here

In the config tree, so that files which set them load; they change nothing.
"""
# The name of a key, or a character by which Markdown means something.
_KEY_OR_SIGN = re.compile(r"[A-Z]+(?:[._][A-Z0-9]+)+|[|~*_<>]")


def reference() -> str:
    """The page: a table for each node, and the keys that do nothing."""
    defaults = {key: value for key, value in walk(get_cfg()) if not isinstance(value, CfgNode)}
    known = all_keys()
    lines = [HEAD]
    for node, keys in groupby(sorted(known, key=_node), key=_node):
        lines += ["", f"## {node or 'The run'}", "", "| key | default | meaning |", "|---|---|---|"]
        lines += [f"| `{key}` | {_code(defaults[key])} | {_meaning(known[key])} |" for key in keys]
    lines.append(UNUSED)
    unused = (key for key in defaults if key not in known)
    for _, keys in groupby(unused, key=_node):
        lines.append("- " + ", ".join(f"`{key}` {_code(defaults[key])}" for key in keys))
    return "\n".join(lines) + "\n"


def _node(key: str) -> str:
    return key.rpartition(".")[0]


def _code(value: Any) -> str:
    return f"`{json.dumps(value) if isinstance(value, str) else value}`"


def _meaning(key: Key) -> str:
    text = _KEY_OR_SIGN.sub(_as_markdown, key.meaning)
    choices = ", ".join(f"`{choice}`" for choice in (*key.choices, *key.words))
    allowed = "a number, " if key.words else ""
    return f"{text}; allowed: {allowed}{choices}" if choices else text


def _as_markdown(match: re.Match[str]) -> str:
    found = match[0]
    return f"\\{found}" if len(found) == 1 else f"`{found}`"
