"""The command line of tools/compare_attention.py."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slowfast_lara.config import ConfigError
from slowfast_lara.study.report import collect, write
from slowfast_lara.study.rows import ABLATION, VIDEO, Table
from slowfast_lara.study.runs import StudyError, make_set, plan, run_all

# The set of configs/study/base.yaml.
VIDEOS = {
    "classes": 12,
    "train": 8192,
    "val": 240,
    "test": 1920,
    "size": 64,
    "frames": 16,
    "seed": 0,
}


def main(root: Path, argv: Sequence[str] | None = None) -> int:
    """Do a study; `root` is the checkout with its configs and tools."""
    args = _parse(argv)
    # So that running runs are stopped, and save themselves.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    try:
        print(study(root, args), end="")
    except (StudyError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    return 0


def study(root: Path, args: argparse.Namespace) -> str:
    table = _chosen(ABLATION if args.ablation else VIDEO, args.rows)
    seeds = list(range(args.seeds))
    work = Path(args.work).resolve()
    videos = {**VIDEOS, "train": args.train, "val": args.val, "test": args.test}
    opts = ["MODEL.NUM_CLASSES", str(videos["classes"]), *args.opts]
    runs = plan(table.rows, seeds, root, work, opts)
    make_set(root, work / "data", videos)
    run_all(runs, root, args.jobs)
    name = "ablation" if args.ablation else "compare_attention"
    contents = ", ".join(f"{key} {value}" for key, value in videos.items())
    notes = [f"`{_command(args)}`", f"Set: {contents}"]
    return write(Path(args.out) / name, table, collect(runs), seeds, notes)


def _command(args: argparse.Namespace) -> str:
    """What makes the same table."""
    words = ["python tools/compare_attention.py"]
    words += ["--ablation"] if args.ablation else []
    words += ["--rows", *args.rows] if args.rows else []
    words += ["--seeds", args.seeds, "--train", args.train, "--val", args.val, "--test", args.test]
    words += ["--opts", *args.opts] if args.opts else []
    return " ".join(map(str, words))


def _chosen(table: Table, names: Sequence[str] | None) -> Table:
    known = {row.name: row for row in table.rows}
    for name in names or ():
        if name not in known:
            raise StudyError(f"unknown row {name!r}; known: {', '.join(known)}")
    return table._replace(rows=tuple(r for r in table.rows if not names or r.name in names))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train and test the attentions of the paper under one small budget."
    )
    parser.add_argument("--ablation", action="store_true", help="the rows of LARA's ablation")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows")
    parser.add_argument("--seeds", type=_count, default=3, help="how many, from 0 (default 3)")
    parser.add_argument(
        "--jobs",
        type=_count,
        default=os.cpu_count(),
        help="runs at a time, each with one thread (default: the cores)",
    )
    parser.add_argument("--work", default="runs/study", help="where the runs and videos are kept")
    parser.add_argument("--out", default="results", help="where the result is written")
    for split in ("train", "val", "test"):
        parser.add_argument(
            f"--{split}",
            type=_count,
            default=VIDEOS[split],
            help=f"videos (default {VIDEOS[split]})",
        )
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="KEY VALUE",
        help="config keys for all runs; last on the line",
    )
    return parser.parse_args(argv)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("at least 1")
    return number
