"""slowfast-lara export: a trained model as files for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import (
    OneLineParser,
    add_classes_argument,
    add_model_arguments,
    split_model,
    split_overrides,
)
from slowfast_lara.errors import InputError, printable, run_with_exit_code

EXAMPLES = """\
examples:
  slowfast-lara export RUN OUT                   weights, config and class names, for `load`
  slowfast-lara export RUN OUT --to onnx         and `python OUT/example.py VIDEO` anywhere
  slowfast-lara export RUN OUT --to torch VIT.APPROX_ATTN_TYPE lara VIT.APPROX_ATTN_DIM 64

OUT is a new folder. What is in it was compared with the model before it was put in place.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_intermixed_args(argv)

    def command() -> None:
        words, overrides = split_overrides(args.words)
        model_files, rest = split_model(args, words)
        if len(rest) != 1:
            raise InputError(f"{len(rest)} folders to write to are given; one is expected")
        from slowfast_lara.inference.export import export
        from slowfast_lara.inference.load import load

        model = load(*model_files, device="cpu", classes=args.classes, overrides=overrides)
        checked = export(model, rest[0], args.to)
        print(f"{printable(rest[0])}: {checked}")

    return run_with_exit_code(command)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(description="Write a trained model for other programs.", epilog=EXAMPLES)
    add_model_arguments(parser)
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN OUT",
        help="the run, or a checkpoint; the folder to make; also KEY VALUE pairs that change the "
        "config",
    )
    parser.add_argument(
        "--to",
        choices=("safetensors", "torch", "onnx"),
        default="safetensors",
        help="weights for `load` (default), a torch.export program, or ONNX",
    )
    add_classes_argument(parser)
    return parser
