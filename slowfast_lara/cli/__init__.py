"""The command line `slowfast-lara SUBCOMMAND ...`: a tree of parsers."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from functools import partial

from slowfast_lara import __version__
from slowfast_lara.cli import data, models, training
from slowfast_lara.cli.parser import CommandParser, Handler
from slowfast_lara.errors import BAD_INPUT, run_with_exit_code
from slowfast_lara.user_code import import_user_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the subcommand and its arguments; default: sys.argv[1:].

    Returns:
        The exit code (see `slowfast_lara.errors`). Bad flags raise SystemExit, as in argparse.
    """
    return run_command(build_parser(), sys.argv[1:] if argv is None else argv)


def build_parser() -> CommandParser:
    """The parser tree of `slowfast-lara`. Building it imports neither PyTorch nor NumPy."""
    root = CommandParser(
        prog="slowfast-lara",
        description="Video transformers with cheaper attention.",
        epilog="`slowfast-lara SUBCOMMAND --help` lists the flags of a subcommand.",
    )
    root.add_argument("--version", action="version", version=__version__)
    training.add_commands(root)
    data.add_commands(root)
    models.add_commands(root)
    return root


def run_command(root: CommandParser, argv: Sequence[str]) -> int:
    """Find the parser of the subcommand, parse the remaining arguments, and call the handler.

    argparse cannot intermix flags and positional arguments in a parser that has subparsers. So
    only the parser of the subcommand, which has no subparsers, parses the arguments.
    """
    parser, words = root, list(argv)
    while words and words[0] in parser.subcommands:
        parser = parser.subcommands[words.pop(0)]
    if parser.handler is None:
        if not words:
            parser.print_help()
            return BAD_INPUT
        if words[0].startswith("-"):
            parser.parse_args(words)  # --help, --version, unknown flags: raises SystemExit
        similar = difflib.get_close_matches(words[0], parser.subcommands, n=1)
        known = ", ".join(parser.subcommands)
        hint = f"did you mean {similar[0]}?" if similar else f"known: {known}"
        parser.error(f"unknown subcommand {words[0]!r}; {hint}")
    return run_with_exit_code(partial(_run, parser.handler, parser.parse_arguments(words)))


def _run(handler: Handler, args: argparse.Namespace) -> int | None:
    # Remove `imports` from args: handlers in studies/__main__.py pass **vars(args) to functions.
    import_user_code(vars(args).pop("imports"))
    return handler(args)
