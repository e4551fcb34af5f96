"""slowfast-lara run, tools/run_net.py: train and test a model by a config file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.cli.shared import OneLineParser
from slowfast_lara.errors import run_with_exit_code


def main(argv: Sequence[str] | None = None) -> int:
    args, opts = parse(argv)

    def command() -> int:
        from slowfast_lara.engine.launch import launch, prepare
        from slowfast_lara.engine.run import run

        return launch(run, prepare(args.cfg, opts, args.init_method), args.init_method)

    return run_with_exit_code(command)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the config keys and values."""
    parser = OneLineParser(
        description="Train and test a video model.",
        usage="%(prog)s --cfg FILE_OR_NAME [flags] [--opts] [KEY VALUE ...]",
        epilog="Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped by SIGTERM, SIGINT or\n"
        "SIGUSR1 and saved (the same command continues), 130 stopped by a second Ctrl-C.",
    )
    parser.add_argument(
        "--cfg",
        required=True,
        help="the config file (YAML), or the name of a shipped one (see `slowfast-lara configs`)",
    )
    parser.add_argument("--num_shards", type=int, help="number of machines (NUM_SHARDS)")
    parser.add_argument("--shard_id", type=int, help="number of this machine, from 0 (SHARD_ID)")
    parser.add_argument(
        "--init_method",
        metavar="tcp://HOST:PORT",
        help="where the processes meet, on machine 0 (default: tcp://localhost:9999; on a "
        "single machine, a free port)",
    )
    parser.add_argument("--opts", action="store_true", help="KEY VALUE pairs follow (optional)")
    args, opts = parser.parse_known_args(argv)
    for key in opts[::2]:
        if key.startswith("-"):
            parser.error(f"unknown flag {key}; see --help")
    for key, value in (("NUM_SHARDS", args.num_shards), ("SHARD_ID", args.shard_id)):
        if value is not None:
            opts += [key, value]
    return args, opts
