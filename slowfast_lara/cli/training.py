"""Subcommands `run` (training and testing), `configs` and `benchmark gpu`."""

from __future__ import annotations

import argparse
import os

from slowfast_lara.cli.parser import (
    CommandParser,
    add_opts_marker,
    add_size_flags,
    add_table_flag,
    positive_int,
    print_table,
)
from slowfast_lara.errors import InputError

PRECISIONS = ("bfloat16", "float16", "float32")
EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 bad input, 75 stopped by SIGTERM, SIGINT or SIGUSR1 after
saving a checkpoint (repeat the command to resume), 130 stopped by a second Ctrl-C.
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
    parser.add_flag("--force", "overwrite the file of --out", action="store_true")

    benchmark = root.add_command(
        "benchmark",
        description="Measure speed on this machine.\n\n`python -m benchmarks` in a checkout "
        "compares the implementations of attention.",
    )
    parser = benchmark.add_command("gpu", gpu)
    add_size_flags(parser)
    precisions = {"choices": PRECISIONS, "default": list(PRECISIONS), "nargs": "+"}
    parser.add_flag("--precisions", "precisions to time", **precisions)
    parser.add_flag("--repeats", "timings; the fastest counts", type=positive_int, default=10)
    add_table_flag(parser, "PATH.csv and PATH.json")


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
    else:
        print(text, end="")


def gpu(args: argparse.Namespace) -> None:
    """Time attention and whole models on this GPU.

    Before that, the results of each kernel are compared with PyTorch in float64.
    """
    from slowfast_lara.analysis.gpu_speed import gpu_costs

    print_table(gpu_costs(args.crops, args.clips, args.precisions, args.repeats), args.out)
