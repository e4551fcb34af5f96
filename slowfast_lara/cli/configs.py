"""slowfast-lara configs: the shipped configs, one of them to edit, every key."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slowfast_lara.cli.shared import OneLineParser
from slowfast_lara.config.shipped import description, shipped_names, standalone
from slowfast_lara.errors import InputError, run_with_exit_code
from slowfast_lara.files import write_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        description="List the shipped configs; or print one as a file that stands alone, to edit."
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the config to print")
    parser.add_argument(
        "--reference", action="store_true", help="instead: every config key, default and meaning"
    )
    parser.add_argument("--out", metavar="FILE", help="write to a file instead of printing")
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    args = parser.parse_args(argv)

    def command() -> None:
        if args.name and args.reference:
            raise InputError("NAME and --reference: one of them is expected")
        if args.out and not args.force and os.path.lexists(args.out):
            raise InputError(f"{args.out} exists; --force overwrites it")
        text = _text(args.name, args.reference)
        if args.out:
            write_text(args.out, text)
        else:
            print(text, end="")

    return run_with_exit_code(command)


def _text(name: str | None, with_reference: bool) -> str:
    if with_reference:
        from slowfast_lara.config.reference import reference  # loads PyTorch

        return reference()
    if name:
        return standalone(name)
    names = shipped_names()
    width = max(map(len, names))
    return "".join(f"{name:<{width}}  {description(name)}\n" for name in names)
