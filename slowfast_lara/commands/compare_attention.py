"""slowfast-lara compare-attention, tools/compare_attention.py: a study of the attentions."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from slowfast_lara.commands.shared import OneLineParser, add_jobs_argument, positive_int
from slowfast_lara.errors import STOPPED, Interrupted, exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    # So that running runs are stopped, and save themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))

    def command() -> None:
        from slowfast_lara.experiments.study import study

        try:
            print(study(**vars(args)), end="")
        except KeyboardInterrupt:
            raise Interrupted("interrupted; the same command goes on from there") from None

    return exit_code_of(command)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="Train and test the attentions of the paper under one small budget."
    )
    parser.add_argument(
        "--protocol",
        choices=("finetune", "scratch"),
        default="finetune",
        help="finetune (the default): exact attention is trained for each seed, and every row "
        "goes on from its weights, as in the paper; scratch: every row from random weights",
    )
    parser.add_argument(
        "--part",
        choices=("all", "compare_attention", "ablation", "landmarks"),
        default="compare_attention",
        help="what to do: the paper's video table (compare_attention, the default), the ablation "
        "of LARA, accuracy and error over the number of landmarks, or all of them",
    )
    parser.add_argument(
        "--textures",
        metavar="FOLDER",
        help="videos of real pixels, as `slowfast-lara data synthetic --textures` makes them",
    )
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument(
        "--seeds", type=positive_int, default=5, help="how many, from 0 (default 5)"
    )
    add_jobs_argument(parser, "runs at a time, each with one thread")
    parser.add_argument("--work", default="runs/study", help="where the runs and videos are kept")
    parser.add_argument("--out", default="results", help="where the result is written")
    for split in ("train", "val", "test"):
        parser.add_argument(f"--{split}", type=positive_int, help=f"videos of {split}")
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="KEY VALUE",
        help="config keys for all runs; last on the line",
    )
    return parser
