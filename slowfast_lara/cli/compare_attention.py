"""slowfast-lara compare-attention, tools/compare_attention.py: a study of the attentions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import OneLineParser, add_study_arguments, positive_int, run_study


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)

    def tables() -> str:
        from studies.study import study

        return study(**vars(args))

    return run_study(tables)


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
    for split in ("train", "val", "test"):
        parser.add_argument(f"--{split}", type=positive_int, help=f"videos of {split}")
    by_default = "5; of the ablation 3, of the landmarks 2"
    add_study_arguments(parser, "runs/study", seeds=None, seeds_by_default=by_default)
    return parser
