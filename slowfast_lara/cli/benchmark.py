"""slowfast-lara benchmark, tools/benchmark.py: speed and memory, measured or estimated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from slowfast_lara.cli.shared import OneLineParser, add_table_argument, existing_file, positive_int
from slowfast_lara.errors import run_with_exit_code


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        description="Measure speed and memory on this machine, or estimate them for a GPU."
    )
    kinds = parser.add_subparsers(
        required=True, dest="kind", metavar="crop|length|data|lists|roofline|gpu|kernels"
    )
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
    _add_lists_arguments(kinds.add_parser("lists", help="start and memory of long lists"))
    _add_roofline_arguments(
        kinds.add_parser("roofline", help="attention on a GPU, estimated without one")
    )
    _add_gpu_arguments(kinds.add_parser("gpu", help="attention and whole models on this GPU"))
    _add_kernel_arguments(
        kinds.add_parser("kernels", help="registers and memory of the GPU kernels, without a GPU")
    )
    args = parser.parse_args(argv)

    def command() -> None:
        flags = {key: value for key, value in vars(args).items() if key not in ("kind", "out")}
        if args.kind == "data":
            from benchmarks.data_speed import as_text, reading_times

            print(as_text(reading_times(**flags)))
            return
        if args.kind == "lists":
            from benchmarks.long_lists import as_table, list_costs

            print(as_table(list_costs(**flags)))
            return
        if args.kind == "kernels":
            from benchmarks import compiled_kernels

            rows = compiled_kernels.compiled_kernels(**flags)
            print(compiled_kernels.as_text(rows))
            if args.out:
                compiled_kernels.write(rows, args.out)
            return
        table = _table(args.kind, flags)
        print(table.text())
        if args.out:
            table.write(args.out)

    return run_with_exit_code(command)


def _table(kind: str, flags: dict[str, Any]) -> Any:
    if kind == "roofline":
        from benchmarks.roofline import roofline

        return roofline(**flags)
    if kind == "gpu":
        from slowfast_lara.analysis.gpu_speed import gpu_costs

        return gpu_costs(**flags)
    from benchmarks.attention_speed import crop_costs, length_costs

    return crop_costs(**flags) if kind == "crop" else length_costs(**flags)


def _add_roofline_arguments(parser: argparse.ArgumentParser) -> None:
    devices = ("A100", "H100", "B200", "L4")
    parser.add_argument("--device", choices=devices, default="A100", help="for which GPU")
    _add_size_arguments(parser)
    parser.add_argument(
        "--frames", type=positive_int, nargs="+", default=[8], help="frames of tokens of a clip"
    )
    parser.add_argument("--landmarks", type=positive_int, default=128, help="or samples")
    add_table_argument(parser)


def _add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    _add_size_arguments(parser)
    parser.add_argument(
        "--precisions",
        nargs="+",
        choices=("bfloat16", "float16", "float32"),
        default=["bfloat16", "float16", "float32"],
        help="of what is timed",
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=10, help="rounds, of which the best counts"
    )
    parser.add_argument("--out", metavar="PATH", help="also write PATH.csv and PATH.json")


def _add_size_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--crops", type=crop_size, nargs="+", default=[224, 336, 448], metavar="PIXELS"
    )
    parser.add_argument("--clips", type=positive_int, default=8, help="in a batch")


def crop_size(text: str) -> int:
    """The type of a flag: pixels that patches of 16 divide."""
    size = positive_int(text)
    if size % 16:
        raise argparse.ArgumentTypeError(f"{text!r}; a multiple of 16 is expected")
    return size


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
    _add_before_argument(parser)


def _add_before_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--before", metavar="CHECKOUT", help="measure an earlier checkout of this package too"
    )


def _add_lists_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--videos", type=positive_int, default=250_000, help="lines of one list")
    parser.add_argument(
        "--frames", type=positive_int, default=8_000_000, help="lines of a list of frames"
    )
    parser.add_argument("--workers", type=positive_int, default=8, help="processes that read it")
    parser.add_argument(
        "--start", choices=("fork", "spawn"), default="fork", help="how they are started"
    )
    _add_before_argument(parser)


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
