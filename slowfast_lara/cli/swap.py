"""slowfast-lara swap: a trained model with other attentions in it, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import (
    OneLineParser,
    add_model_arguments,
    add_table_argument,
    positive_int,
    split_model,
    split_overrides,
)
from slowfast_lara.errors import InputError, run_with_exit_code

EXAMPLES = """\
examples:
  slowfast-lara swap RUN
  slowfast-lara swap RUN --attentions lara nystrom --landmarks 8 16 32 --views 3 --videos 100
  slowfast-lara swap RUN DATA.PATH_TO_DATA_DIR lists/elsewhere --out results/swap
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_intermixed_args(argv)

    def command() -> None:
        words, overrides = split_overrides(args.words)
        model_files, rest = split_model(args, words)
        if rest:
            raise InputError(f"{rest[0]!r} is neither the run nor a config key; see --help")
        from slowfast_lara.analysis.swap import swap

        table = swap(
            model_files,
            overrides,
            attentions=args.attentions,
            landmarks=args.landmarks,
            views=args.views,
            videos=args.videos,
        )
        print(table.text())
        if args.out:
            table.write(args.out)

    return run_with_exit_code(command)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="Test a trained model with other attentions in it, without training: accuracy "
        "on its test\nlist, and time of a view.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN",
        help="the run, or a checkpoint; also KEY VALUE pairs that change the config",
    )
    parser.add_argument(
        "--attentions", nargs="+", metavar="NAME", help="which ones (default: all there are)"
    )
    parser.add_argument(
        "--landmarks",
        type=positive_int,
        nargs="+",
        default=[8, 16, 32, 64, 128],
        metavar="C",
        help="numbers of landmarks or samples (default: 8 16 32 64 128); those beyond the number "
        "of tokens are left out",
    )
    parser.add_argument(
        "--views", type=positive_int, metavar="N", help="of each video (default: as in the config)"
    )
    parser.add_argument(
        "--videos",
        type=positive_int,
        metavar="N",
        help="so many of the test list, evenly spread (default: all)",
    )
    add_table_argument(parser)
    return parser
