"""The command line of tools/run_net.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from fvcore.common.config import CfgNode

from slowfast_lara.config import ConfigError, check_machine, load_config
from slowfast_lara.engine.failures import BAD_INPUT, DONE, complain, exit_code_of
from slowfast_lara.engine.launch import DEFAULT_INIT_METHOD, launch, settle, under_torchrun
from slowfast_lara.engine.run import run


class OneLineParser(argparse.ArgumentParser):
    """Errors without the usage before them."""

    def error(self, message: str) -> NoReturn:
        complain(message)
        raise SystemExit(BAD_INPUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Train and test by a config file; the exit code (see `failures`)."""
    args, opts = _parse(argv)
    cfg: list[CfgNode] = []

    def prepare() -> None:
        cfg.append(settle(load_config(args.cfg, opts)))
        _check_meeting(cfg[0], args, opts)
        check_machine(cfg[0])

    code = exit_code_of(prepare)
    return launch(run, cfg[0], args.init_method) if code == DONE else code


def _check_meeting(cfg: CfgNode, args: argparse.Namespace, opts: Sequence[str]) -> None:
    """A file for several machines, and a command for one, would wait for the others."""
    told = args.init_method is not None or "SHARD_ID" in opts or "NUM_SHARDS" in opts
    if cfg.NUM_SHARDS > 1 and cfg.SHARD_ID == 0 and not told and not under_torchrun():
        raise ConfigError(
            f"NUM_SHARDS is {cfg.NUM_SHARDS} in {args.cfg}; on each of so many machines "
            "--shard_id I --init_method tcp://HOST:PORT is expected, or NUM_SHARDS 1 for this "
            "one alone"
        )


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = OneLineParser(
        description="Train and test a video model.",
        usage="run_net.py --cfg FILE.yaml [flags] [--opts] [KEY VALUE ...]",
        epilog="Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped by SIGTERM, SIGINT or "
        "SIGUSR1 and saved (the same command continues), 130 stopped by a second Ctrl-C.",
        allow_abbrev=False,
    )
    parser.add_argument("--cfg", required=True, help="the config file (YAML)")
    parser.add_argument("--num_shards", type=int, help="number of machines (NUM_SHARDS)")
    parser.add_argument("--shard_id", type=int, help="number of this machine, from 0 (SHARD_ID)")
    parser.add_argument(
        "--init_method",
        metavar="tcp://HOST:PORT",
        help=f"where the processes meet, on machine 0 (default {DEFAULT_INIT_METHOD}; on a "
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
