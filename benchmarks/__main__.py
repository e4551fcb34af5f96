"""Command line of the benchmarks: `python -m benchmarks SUBCOMMAND ...`, from a checkout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from slowfast_lara.cli import run_command
from slowfast_lara.cli.parser import (
    CommandParser,
    add_size_flags,
    add_table_flag,
    crop_size,
    positive_float,
    positive_int,
    print_table,
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(build_parser(), sys.argv[1:] if argv is None else argv)


def build_parser() -> CommandParser:
    root = CommandParser(
        prog="python -m benchmarks",
        description="Measure speed, memory and errors on this machine, or estimate GPU speed.",
    )
    _add_speed_commands(root)

    parser = root.add_command("errors", errors)
    sizes = {"type": positive_int, "nargs": "+"}
    numbers = "numbers of landmarks or samples"
    parser.add_flag("--samples", numbers, default=[16, 32, 64, 128, 256], metavar="C", **sizes)
    parser.add_flag("--seeds", "seeds of random attentions", type=positive_int, default=5)
    add_table_flag(parser)

    parser = root.add_command("data", data)
    parser.add_argument("videos", nargs="+", type=existing_file, metavar="VIDEO")
    parser.add_flag("--frames", "frames of a clip", type=positive_int, default=16)
    parser.add_flag("--rate", "sampling rate, in frames", type=positive_int, default=4)
    parser.add_flag("--rounds", "measured rounds", type=positive_int, default=3)
    samples = "random training samples per video and round"
    parser.add_flag("--train-samples", samples, type=positive_int, default=20)
    _add_checkout_flags(parser)

    parser = root.add_command("lists", lists)
    parser.add_flag("--videos", "lines of a list of videos", type=positive_int, default=250_000)
    parser.add_flag("--frames", "lines of a list of frames", type=positive_int, default=8_000_000)
    parser.add_flag("--workers", "DataLoader workers", type=positive_int, default=8)
    methods = ("fork", "spawn")
    parser.add_flag("--start", "start method of the workers", choices=methods, default="fork")
    _add_checkout_flags(parser)

    _add_estimates(root)

    parser = root.add_command("kernels", kernels)
    parser.add_flag("--kernels", "kernels (default: all)", nargs="+", metavar="NAME", default=[])
    archs = "compute capabilities without the point, such as 80 for sm_80 (default: all)"
    parser.add_flag("--archs", archs, type=int, nargs="+", default=[])
    add_table_flag(parser, "PATH.csv and PATH.md")
    return root


def _add_estimates(root: CommandParser) -> None:
    """Add the commands that count operations and memory traffic instead of running kernels."""
    parser = root.add_command("roofline", roofline)
    parser.add_flag("--device", "the GPU: A100, H100, B200 or L4", default="A100")
    add_size_flags(parser)
    frames = "temporal tokens of a clip"
    parser.add_flag("--frames", frames, type=positive_int, nargs="+", default=[8])
    _add_landmark_flags(parser)
    add_table_flag(parser)

    parser = root.add_command("joint", joint)
    devices = "GPUs: A100, H100, B200, L4"
    parser.add_flag("--devices", devices, nargs="+", default=["A100", "H100"], metavar="GPU")
    parser.add_flag("--clips", "batch size", type=positive_int, default=4)
    _add_landmark_flags(parser)
    add_table_flag(parser, "PATH.csv and PATH.md")

    parser = root.add_command("step", step)
    names = ["motionformer", "lara", "lara_best", "merged"]
    shipped = [f"K400/{name}_224_16x4" for name in names]
    parser.add_flag("--configs", "shipped configs", nargs="+", default=shipped, metavar="NAME")
    parser.add_flag("--clips", "batch size", type=positive_int, default=8)
    _add_checkout_flags(parser, "PATH.csv and PATH.md")

    parser = root.add_command("scale", scale)
    parser.add_flag("--device", "the GPUs: A100 or H100", default="A100")
    number = {"type": positive_int, "nargs": "+", "metavar": "N"}
    parser.add_flag("--gpus", "numbers of GPUs", default=[1, 8, 64], **number)
    add_size_flags(parser, clips=("maximum clips per GPU", 32))
    parser.add_flag("--frames", "frames of a clip", default=[8, 16, 32, 64], **number)
    share = "assumed share of the roofline that kernels reach"
    parser.add_flag("--efficiency", share, type=positive_float, default=0.5)
    decode = "milliseconds to decode 16 frames on one core; see `slowfast-lara data speed`"
    parser.add_flag("--decode-ms", decode, type=positive_float, default=13.3)
    add_table_flag(parser, "PATH.csv and PATH.md")


def _add_landmark_flags(parser: CommandParser) -> None:
    parser.add_flag("--landmarks", "landmarks or samples", type=positive_int, default=128)
    parser.add_flag("--groups", "groups of a frame's keys", type=positive_int, default=96)


def _add_speed_commands(root: CommandParser) -> None:
    """Add the commands that time attentions on this machine."""
    parser = root.add_command("crop", crop)
    # Every clip has at least as many tokens as landmarks.
    sizes = {"type": at_least(64, crop_size), "nargs": "+", "metavar": "PIXELS"}
    parser.add_flag("--crops", "crop sizes", default=[224, 336, 448], **sizes)
    parser.add_flag("--flops", "also count the GFLOPs of whole models", action="store_true")
    _add_attention_flags(parser)

    parser = root.add_command("stage", stage)
    parser.add_flag("--crops", "crop sizes", default=[224, 336], **sizes)
    groups = "groups of a frame's keys; for eva: keys and summaries per query and frame"
    parser.add_flag("--groups", groups, type=positive_int, default=96)
    _add_attention_flags(parser)

    sizes = {"type": at_least(16), "nargs": "+", "metavar": "TOKENS"}
    parser = root.add_command("length", length)
    lengths = [1024, 2048, 3072, 4096, 8192]
    parser.add_flag("--lengths", "sequence lengths", default=lengths, **sizes)
    _add_attention_flags(parser)

    sizes["type"] = at_least(129)
    parser = root.add_command("vjepa2", vjepa2)
    frames = "tokens; two frames of 256 x 256 pixels (one tubelet) have 256"
    parser.add_flag("--tokens", frames, default=[2048, 8192], **sizes)
    _add_attention_flags(parser)


def _add_attention_flags(parser: CommandParser) -> None:
    parser.add_flag("--estimators", "attentions (default: all)", nargs="+", metavar="NAME")
    parser.add_flag("--repeats", "rounds; the best time is reported", type=positive_int, default=5)
    add_table_flag(parser)


def _add_checkout_flags(parser: CommandParser, files: str = "PATH.csv") -> None:
    parser.add_flag("--before", "also measure an earlier checkout", metavar="CHECKOUT")
    add_table_flag(parser, files)


def at_least(least: int, parse: Callable[[str], int] = positive_int) -> Callable[[str], int]:
    """Argument type: a number of at least `least`."""

    def checked(text: str) -> int:
        number = parse(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {text!r}")
        return number

    return checked


def existing_file(text: str) -> str:
    """Argument type: the path of an existing file."""
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return text


def crop(args: argparse.Namespace) -> None:
    """Time a trajectory layer at several crop sizes."""
    from benchmarks.attention_speed import crop_costs

    print_table(crop_costs(args.crops, args.estimators, args.repeats, args.flops), args.out)


def stage(args: argparse.Namespace) -> None:
    """Time the spatial stage of a trajectory layer, the attention alone, at several crop sizes."""
    from benchmarks.attention_speed import stage_costs

    print_table(stage_costs(args.crops, args.estimators, args.repeats, args.groups), args.out)


def length(args: argparse.Namespace) -> None:
    """Time the encoder of the paper's efficiency table at several sequence lengths."""
    from benchmarks.attention_speed import length_costs

    print_table(length_costs(args.lengths, args.estimators, args.repeats), args.out)


def vjepa2(args: argparse.Namespace) -> None:
    """Time a layer of V-JEPA 2-L (transformers) with its own attention and with the estimators."""
    from benchmarks.attention_speed import vjepa2_costs

    print_table(vjepa2_costs(args.tokens, args.estimators, args.repeats), args.out)


def errors(args: argparse.Namespace) -> None:
    """Measure the error of each attention, compared with exact attention, on random q, k, v."""
    from benchmarks.random_errors import measure_errors, smooth_inputs
    from slowfast_lara.config import get_cfg

    print_table(measure_errors(smooth_inputs(), get_cfg(), args.samples, args.seeds), args.out)


def data(args: argparse.Namespace) -> None:
    """Time the reading of videos by this package and by PySlowFast."""
    from benchmarks.data_speed import reading_times

    table = reading_times(
        args.videos,
        frames=args.frames,
        rate=args.rate,
        rounds=args.rounds,
        train_samples=args.train_samples,
        before=args.before,
    )
    print_table(table, args.out)


def lists(args: argparse.Namespace) -> None:
    """Measure the time to read long lists, and the memory of DataLoader workers."""
    from benchmarks.long_lists import list_costs

    table = list_costs(args.videos, args.frames, args.workers, args.start, args.before)
    print_table(table, args.out)


def roofline(args: argparse.Namespace) -> None:
    """Estimate the time of attention on a GPU; needs no GPU."""
    from benchmarks.roofline import roofline

    sizes = args.crops, args.frames, args.clips, args.landmarks, args.groups
    table = roofline(args.device, *sizes)
    print_table(table, args.out)


def joint(args: argparse.Namespace) -> None:
    """Estimate a layer of other video transformers with our attentions; needs no GPU."""
    from benchmarks.joint import joint_costs

    print_table(joint_costs(args.devices, args.clips, args.landmarks, args.groups), args.out)


def step(args: argparse.Namespace) -> None:
    """Count the launches and the saved bytes of a training step; needs no GPU."""
    from benchmarks.step_counts import step_counts

    print_table(step_counts(args.configs, args.clips, args.before), args.out)


def scale(args: argparse.Namespace) -> None:
    """Estimate training speed and memory by model, clip and number of GPUs; needs no GPU."""
    from benchmarks.scale import scale

    sizes = args.gpus, args.crops, args.frames, args.clips
    print_table(scale(args.device, *sizes, args.efficiency, args.decode_ms), args.out)


def kernels(args: argparse.Namespace) -> None:
    """Compile the GPU kernels without a GPU; report registers, spills and shared memory."""
    from benchmarks.compiled_kernels import compiled_kernels

    print_table(compiled_kernels(args.kernels, args.archs), args.out)


if __name__ == "__main__":
    sys.exit(main())
