"""slowfast-lara demo: a page to play with a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import (
    OneLineParser,
    add_classes_argument,
    add_model_arguments,
    positive_int,
    split_model,
    split_overrides,
)
from slowfast_lara.errors import InputError, run_with_exit_code

EXAMPLES = """\
examples:
  slowfast-lara demo RUN
  slowfast-lara demo model.pyth --port 8000 --views 30

RUN is a run's folder (its best checkpoint is used, if one was kept, or else the newest) or a
checkpoint. The page is for this machine alone unless --host says otherwise; it sends nothing
anywhere, and what is dropped on it is removed as soon as it is read.
It needs Gradio: pip install 'slowfast_lara[demo]'.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_intermixed_args(argv)

    def command() -> None:
        words, overrides = split_overrides(args.words)
        model_files, rest = split_model(args, words)
        if rest:
            raise InputError(f"{rest[0]!r} is neither the run nor a config key; see --help")
        from slowfast_lara.inference.load import load
        from slowfast_lara.inference.model import with_views
        from slowfast_lara.models.numerics import choose_threads
        from slowfast_lara.visualization.demo import serve

        model = load(*model_files, classes=args.classes, overrides=overrides)
        with_views(model.cfg, args.views)  # refuses what is not allowed
        choose_threads(model.cfg)
        serve(
            model,
            host=args.host,
            port=args.port,
            views=args.views,
            most_megabytes=args.megabytes,
            most_minutes=args.minutes,
        )

    return run_with_exit_code(command)


def _port(text: str) -> int:
    number = positive_int(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; 1 to 65535 are allowed")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="A page on this machine: drop a video, see its classes, click a patch and see\n"
        "where its attention goes, by exact attention and by the estimators.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN",
        help="the run, or a checkpoint; also KEY VALUE pairs that change the config",
    )
    add_classes_argument(parser)
    parser.add_argument(
        "--views",
        type=positive_int,
        metavar="N",
        help="clips and crops to average, 1 to 30 (default: as in the config)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on (default: 127.0.0.1, which no other machine reaches)",
    )
    parser.add_argument("--port", type=_port, default=7860, help="default: 7860")
    parser.add_argument(
        "--megabytes",
        type=positive_int,
        default=200,
        metavar="N",
        help="the largest file that is taken (default: 200)",
    )
    parser.add_argument(
        "--minutes",
        type=positive_int,
        default=10,
        metavar="N",
        help="the longest video that is taken (default: 10)",
    )
    return parser
