"""Subcommands `run` (training and testing), `configs` and `benchmark gpu`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from slowfast_lara.cli.parser import (
    CommandParser,
    add_opts_marker,
    add_size_flags,
    positive_float,
    positive_int,
)
from slowfast_lara.errors import InputError

PRECISIONS = ("bfloat16", "float16", "float32")
PATHS = ("torch", "triton", "compile", "triton+compile")
GPU_EPILOG = """\
Each measurement is written to PATH.csv (see --out) immediately. If a measurement fails (e.g. out of
memory), the reason is written. To resume, repeat the command. A PATH.csv of another GPU, driver,
version or settings is refused.
"""
EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 bad input, 75 stopped by SIGTERM, SIGINT or SIGUSR1 with the
state saved (repeat the command to resume), 130 stopped by a second SIGTERM or SIGINT (Ctrl-C).
"""


def add_commands(root: CommandParser) -> None:
    usage = "%(prog)s --cfg FILE_OR_NAME [flags] [--opts] [KEY VALUE ...]"
    parser = root.add_command("run", run, bare_overrides=True, usage=usage, epilog=EXIT_CODES)
    config = "a YAML file, or the name of a shipped config (see `slowfast-lara configs`)"
    parser.add_flag("--cfg", config, required=True)
    parser.add_flag("--num_shards", "number of nodes (NUM_SHARDS)", type=int)
    parser.add_flag("--shard_id", "index of this node, from 0 (SHARD_ID)", type=int)
    parser.add_flag(
        "--init_method",
        "rendezvous address, on node 0 (default: tcp://localhost:9999, or a free port if there is "
        "only one node)",
        metavar="tcp://HOST:PORT",
    )
    add_opts_marker(parser)

    parser = root.add_command("configs", configs)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the config to print")
    parser.add_flag("--out", "write to a file instead of printing", metavar="FILE")
    parser.add_flag("--force", "overwrite the --out file if it exists", action="store_true")

    benchmark = root.add_command(
        "benchmark",
        description="Measure speed on this machine.\n\n`python -m benchmarks` in a checkout "
        "compares the implementations of attention.",
    )
    _add_gpu(benchmark)


def _add_gpu(benchmark: CommandParser) -> None:
    parser = benchmark.add_command("gpu", gpu, epilog=GPU_EPILOG)
    add_size_flags(parser)
    several: dict[str, Any] = {"type": positive_int, "nargs": "+"}
    parser.add_flag("--frames", "temporal tokens per clip", default=[8, 16, 32], **several)
    precisions = {"choices": PRECISIONS, "default": list(PRECISIONS), "nargs": "+"}
    parser.add_flag("--precisions", "precisions to time", **precisions)
    names = "attentions (default: all; in whole models, only exact and those with Triton kernels)"
    parser.add_flag("--attentions", names, nargs="+", metavar="NAME")
    paths = {"choices": PATHS, "default": list(PATHS), "nargs": "+"}
    parser.add_flag("--paths", "implementations", **paths)
    parser.add_flag("--layers", "number of layers of the models", type=positive_int, default=12)
    seconds = "seconds per measurement, after a warm-up"
    parser.add_flag("--seconds", seconds, type=positive_float, default=0.5)
    limit = "start no measurement after this number of minutes"
    parser.add_flag("--minutes", limit, type=positive_float, default=55)
    device = "device to measure; cpu is only for trying out the command"
    parser.add_flag("--device", device, choices=("cuda", "cpu"), default="cuda")
    parser.add_flag("--out", "write PATH.csv", metavar="PATH", default="gpu_benchmark")


def run(args: argparse.Namespace) -> int:
    """Train and test a model as a config describes."""
    from slowfast_lara.engine import launch
    from slowfast_lara.engine.run import run

    opts = [*args.opts]
    for key, value in (("NUM_SHARDS", args.num_shards), ("SHARD_ID", args.shard_id)):
        if value is not None:
            opts += [key, value]
    cfg = launch.prepare(args.cfg, opts, args.init_method)
    return launch.launch(run, cfg, args.init_method)


def configs(args: argparse.Namespace) -> None:
    """List the shipped configs, or print one of them.

    A printed config includes its base configs, so it needs no other file.
    """
    from slowfast_lara.config.shipped import description, shipped_names
    from slowfast_lara.config.yaml_files import standalone
    from slowfast_lara.files import write_text

    if args.out and not args.force and os.path.lexists(args.out):
        raise InputError(f"{args.out} exists; --force overwrites it")
    if args.name:
        text = standalone(args.name)
    else:
        names = shipped_names()
        width = max(map(len, names))
        text = "".join(f"{name:<{width}}  {description(name)}\n" for name in names)
    if args.out:
        write_text(args.out, text)
        print(f"Wrote {args.out}")
    else:
        print(text, end="")


def gpu(args: argparse.Namespace) -> None:
    """Check and time the kernels, every attention and whole training steps on this GPU.

    First, the results of each kernel are compared with PyTorch in float64. Then these
    are timed: forward and backward pass of every attention and of the temporal stage, training
    steps of ViT-B, and inference of ViT-B. Each is timed with PyTorch's operations, with the Triton
    kernels, and with torch.compile. Columns named host have the time that Python needs to launch
    the operations.
    """
    from slowfast_lara.analysis.gpu_jobs import Settings
    from slowfast_lara.analysis.gpu_speed import Plan, benchmark_gpu

    plan = Plan(args.crops, args.frames, args.precisions, args.attentions, args.paths)
    settings = Settings(args.device, args.clips, args.layers, args.seconds)
    benchmark_gpu(plan, settings, args.minutes, args.out)
