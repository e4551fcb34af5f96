"""slowfast-lara compare-recipes: a study of fine-tuning on few clips."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import OneLineParser, add_study_arguments, positive_int, run_study


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)

    def study() -> str:
        from studies.recipes import compare_recipes

        return compare_recipes(**vars(args))

    return run_study(study)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="Fine-tune one small model on few clips, plainly and by the recipe of\n"
        "configs/finetune, and by each of its parts; docs/finetuning.md has the result."
    )
    parser.add_argument(
        "--clips",
        nargs="+",
        type=positive_int,
        default=[240, 24],
        help="how many there are to train on; the parts are tried with the first number "
        "(default 240 24)",
    )
    parser.add_argument(
        "--train", type=positive_int, default=2048, help="videos of the training before"
    )
    add_study_arguments(parser, work="runs/recipes")
    return parser
