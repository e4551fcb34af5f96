"""Generate docs/config.md, the reference of all config keys.

`python docs/config_reference.py` writes the page; `--check` fails if the page is outdated.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.attention.registry import Option
from slowfast_lara.config.defaults import get_cfg, walk
from slowfast_lara.config.keys import ANY, Key, all_keys

PAGE = Path(__file__).with_name("config.md")
COMMAND = "python docs/config_reference.py"
HEAD = f"""\
# Every config key

Set a key in a YAML file or, as `KEY VALUE`, on the command line. *Affects* is what a change affects
when a run resumes: nothing (paths, logging, hardware and the batch size that fits it, tests,
initial weights), the training from then on, the attention (which may be swapped on purpose), the
model's output, or how the model uses its weights. All but the first need
`TRAIN.ACCEPT_CHANGES True`.

This page is generated from `slowfast_lara/config/keys.py` and the signatures of the estimators:
`{COMMAND}`."""
UNUSED = """
## PySlowFast's, not used here

These keys exist so that files which set them load. They have no effect.
"""
# The name of a key, or a character with a meaning in Markdown.
_KEY_OR_SPECIAL = re.compile(r"[A-Z]+(?:[._][A-Z0-9]+)+|[][|~*_<>]")


def reference() -> str:
    """The page: one table per node, then the keys without effect."""
    defaults = {key: value for key, value in walk(get_cfg()) if not isinstance(value, CfgNode)}
    known = all_keys()
    lines = [HEAD]
    for node, keys in groupby(sorted(known, key=_node), key=_node):
        lines += ["", f"## {node or 'The run'}", ""]
        lines += ["| key | default | affects | meaning |", "|---|---|---|---|"]
        for key in keys:
            cells = f"`{key}`", _code(defaults[key]), known[key].affects.name.lower()
            lines.append(f"| {' | '.join(cells)} | {_meaning(known[key])} |")
    lines.append(UNUSED)
    lines += [f"- `{key}` {_code(value)}" for key, value in defaults.items() if key not in known]
    return "\n".join(lines) + "\n"


def _node(key: str) -> str:
    return key.rpartition(".")[0]


def _code(value: Any) -> str:
    return f"`{json.dumps(value) if isinstance(value, str) else value}`"


def _meaning(key: Key) -> str:
    rule, text = key.allowed, _escape(key.meaning)
    values = ", ".join(f"`{value}`" for value in (*rule.choices, *getattr(rule, "words", ())))
    if values:
        return f"{text}; allowed: {values if rule.choices else f'a number, {values}'}"
    return text if rule is ANY or isinstance(rule, Option) else f"{text}; {_escape(rule.text)}"


def _escape(text: str) -> str:
    """Format the names of keys as code and escape special characters."""
    return _KEY_OR_SPECIAL.sub(lambda m: f"\\{m[0]}" if len(m[0]) == 1 else f"`{m[0]}`", text)


def main(args: list[str]) -> str | None:
    """Write or check the page; returns an error message, or None."""
    if args not in ([], ["--check"]):
        return f"usage: {COMMAND} [--check]"
    text = reference()
    if not args:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        return f"{PAGE} is outdated; run: {COMMAND}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
