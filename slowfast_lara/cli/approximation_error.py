"""slowfast-lara approximation-error, tools/approximation_error.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slowfast_lara.cli.shared import (
    OneLineParser,
    add_model_arguments,
    add_table_argument,
    positive_int,
    split_model,
    split_overrides,
)
from slowfast_lara.errors import InputError, run_with_exit_code

if TYPE_CHECKING:
    from slowfast_lara.analysis.approximation_error import ErrorTable
    from slowfast_lara.analysis.nearest_attention import NearestTable

DESCRIPTION = """\
Measure how far each attention is from exact attention, over its number of samples or landmarks:

on the q, k, v of a trained model that looks at videos, with all proposals and kinds of landmarks.
It says which setting is nearest for this model, at which cost, and prints the config lines for it.
Cost is the number of products of the spatial stage. Moving: the same error with tokens that count
by how much their pixels change from one token to the next at the same place;

or, without a model, on random q, k, v.
"""
BUDGET = 0.5
EXAMPLES = """\
examples:
  slowfast-lara approximation-error
  slowfast-lara approximation-error RUN video.mp4 another.mp4 --out results/nearest
  slowfast-lara approximation-error RUN FOLDER --attentions lara --samples 8 16 32 --budget 0.25
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_intermixed_args(argv)

    def command() -> None:
        table = _random_table(args) if _without_model(args) else _model_table(args)
        print(table.text())
        if args.out:
            table.write(args.out)

    return run_with_exit_code(command)


def _without_model(args: argparse.Namespace) -> bool:
    return not (args.words or args.checkpoint or args.cfg or args.video)


def _random_table(args: argparse.Namespace) -> ErrorTable:
    for flag in ("attentions", "layer", "budget"):
        if getattr(args, flag) is not None:
            raise InputError(f"--{flag} is for a model: give RUN and VIDEO too")
    from slowfast_lara.analysis.approximation_error import errors_on_random

    return errors_on_random(args.samples, args.seeds)


def _model_table(args: argparse.Namespace) -> NearestTable:
    words, overrides = split_overrides(args.words)
    model_files, videos = split_model(args, words)
    videos += args.video
    if not videos:
        raise InputError("no video given; see --help")
    from slowfast_lara.analysis.nearest_attention import nearest_in_model

    return nearest_in_model(
        model_files,
        overrides,
        videos,
        attentions=args.attentions,
        layer=args.layer,
        samples=args.samples,
        seeds=args.seeds,
        budget=args.budget or BUDGET,
    )


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description=DESCRIPTION, epilog=EXAMPLES)
    add_model_arguments(parser)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN VIDEO_OR_FOLDER",
        help="the run; videos, or folders of which every file is taken; also KEY VALUE pairs that "
        "change the config",
    )
    parser.add_argument(
        "--video", action="append", default=[], metavar="FILE", help="another way to give a video"
    )
    parser.add_argument(
        "--samples",
        type=positive_int,
        nargs="+",
        default=[16, 32, 64, 128, 256],
        metavar="S",
        help="numbers of samples or landmarks (default: 16 32 64 128 256); those beyond the "
        "number of tokens are left out",
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=5, help="repetitions of what is random (default 5)"
    )
    parser.add_argument(
        "--attentions",
        nargs="+",
        metavar="NAME",
        help="which ones, in a model (default: all there are)",
    )
    parser.add_argument("--layer", type=int, help="one of a model's layers, from 0 (default: all)")
    parser.add_argument(
        "--budget",
        type=_share,
        metavar="SHARE",
        help="what may be recommended, in a model: at most this share of the products of exact "
        f"attention (default {BUDGET})",
    )
    add_table_argument(parser)
    return parser


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; a positive number is expected")
    return share
