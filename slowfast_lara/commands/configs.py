"""slowfast-lara configs: the shipped configs, and one of them to edit."""

from __future__ import annotations

from collections.abc import Sequence

from slowfast_lara.commands.shared import OneLineParser
from slowfast_lara.errors import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(description="List the shipped configs, or write one out to edit.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the config to write out")
    parser.add_argument("--out", metavar="FILE", help="where to (default: print it)")
    parser.parse_args(argv)
    return exit_code_of(lambda: None)
