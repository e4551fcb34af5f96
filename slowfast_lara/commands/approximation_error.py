"""slowfast-lara approximation-error, tools/approximation_error.py."""

from __future__ import annotations

from collections.abc import Sequence

from slowfast_lara.commands.shared import OneLineParser, add_table_argument, positive_int
from slowfast_lara.errors import InputError, exit_code_of


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
        help="numbers of samples or landmarks (default: 16 32 64 128 256); those beyond the "
        "number of tokens are left out",
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
        from slowfast_lara.experiments.approximation_error import errors_in_model, errors_on_random

        model = (args.cfg, args.checkpoint, args.video)
        if all(model):
            table = errors_in_model(*model, args.layer, args.samples, args.seeds)
        elif any(model):
            raise InputError("--cfg, --checkpoint and --video belong together")
        else:
            table = errors_on_random(args.samples, args.seeds)
        print(table.text())
        if args.out:
            table.write(args.out)

    return exit_code_of(command)
