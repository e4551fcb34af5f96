"""Measure speed and memory here: `crop`, `length` (attention) and `data` (videos)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slowfast_lara.benchmark import attention, data


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, add_arguments, run, about in (
        ("crop", attention.add_crop_arguments, attention.run_crop, "the trajectory layer"),
        ("length", attention.add_length_arguments, attention.run_length, "the paper's table"),
        ("data", data.add_arguments, data.run, "reading videos, against PySlowFast"),
    ):
        command = commands.add_parser(name, help=about)
        add_arguments(command)
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    args.run(args)
    return 0
