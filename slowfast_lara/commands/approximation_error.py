"""slowfast-lara approximation-error, tools/approximation_error.py."""

from __future__ import annotations

from collections.abc import Sequence

from slowfast_lara.commands.shared import OneLineParser, add_table_argument, positive_int
from slowfast_lara.errors import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        description="Measure how far each estimator is from exact attention: on the q, k, v of a\n"
        "model that looks at a video (--cfg, --checkpoint, --video), or on random ones."
    )
    parser.add_argument(
        "--samples",
        type=positive_int,
        nargs="+",
        default=[16, 32, 64, 128, 256],
        metavar="S",
        help="numbers of samples or landmarks (default: 16 32 64 128 256)",
    )
    parser.add_argument(
        "--seeds", type=positive_int, default=5, help="repetitions of what is random (default 5)"
    )
    parser.add_argument(
        "--cfg", metavar="FILE_OR_NAME", help="config of a model to take q, k, v from"
    )
    parser.add_argument("--checkpoint", metavar="FILE", help="its weights")
    parser.add_argument("--video", metavar="FILE", help="what it looks at")
    parser.add_argument("--layer", type=int, default=0, help="which of its layers, from 0")
    add_table_argument(parser)
    args = parser.parse_args(argv)

    def command() -> None:
        from slowfast_lara.experiments.approximation_error import run

        errors = run(args)
        print(errors.table())
        if args.out:
            errors.write(args.out)

    return exit_code_of(command)
