"""slowfast-lara benchmark, tools/benchmark.py: speed and memory on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.commands.shared import (
    OneLineParser,
    add_table_argument,
    existing_file,
    positive_int,
)
from slowfast_lara.errors import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(description="Measure speed and memory on this machine.")
    kinds = parser.add_subparsers(required=True, dest="kind", metavar="crop|length|data|kernels")
    crop = kinds.add_parser("crop", help="a trajectory layer over the size of the crop")
    crop.add_argument(
        "--crops", type=positive_int, nargs="+", default=[224, 336, 448], metavar="PIXELS"
    )
    crop.add_argument("--flops", action="store_true", help="count GFLOPs of whole models too")
    length = kinds.add_parser("length", help="the paper's efficiency table")
    length.add_argument(
        "--lengths",
        type=positive_int,
        nargs="+",
        default=[1024, 2048, 3072, 4096, 8192],
        metavar="TOKENS",
    )
    for kind in (crop, length):
        _add_attention_arguments(kind)
    _add_data_arguments(kinds.add_parser("data", help="reading videos, against PySlowFast"))
    _add_kernel_arguments(
        kinds.add_parser("kernels", help="registers and memory of the GPU kernels, without a GPU")
    )
    args = parser.parse_args(argv)

    def command() -> None:
        flags = {key: value for key, value in vars(args).items() if key not in ("kind", "out")}
        if args.kind == "data":
            from slowfast_lara.experiments.data_speed import as_text, reading_times

            print(as_text(reading_times(**flags)))
            return
        if args.kind == "kernels":
            from slowfast_lara.experiments import compiled_kernels

            rows = compiled_kernels.compiled_kernels(**flags)
            print(compiled_kernels.as_text(rows))
            if args.out:
                compiled_kernels.write(rows, args.out)
            return
        from slowfast_lara.experiments.attention_speed import crop_costs, length_costs

        table = crop_costs(**flags) if args.kind == "crop" else length_costs(**flags)
        print(table.text())
        if args.out:
            table.write(args.out)

    return exit_code_of(command)


def _add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--estimators", nargs="+", metavar="NAME", help="which attentions (default: all)"
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=5, help="rounds, of which the best counts"
    )
    add_table_argument(parser)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", nargs="+", type=existing_file, metavar="VIDEO")
    parser.add_argument("--frames", type=positive_int, default=16, help="frames of a clip")
    parser.add_argument(
        "--rate",
        type=positive_int,
        default=4,
        help="frames of the video from one of a clip to the next",
    )
    parser.add_argument("--rounds", type=positive_int, default=3, help="repetitions")
    parser.add_argument(
        "--train-samples",
        type=positive_int,
        default=20,
        help="random training samples of each video in a round",
    )


def _add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernels", nargs="+", metavar="NAME", default=[], help="default: all")
    parser.add_argument(
        "--archs",
        type=int,
        nargs="+",
        choices=(80, 90, 100),
        default=[],
        help="the GPUs, as compute capabilities without the point (default: all)",
    )
    parser.add_argument("--out", metavar="PATH", help="also write PATH.csv and PATH.md")
