"""A study: every attention trained and tested on one synthetic set, over several seeds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slowfast_lara.errors import InputError
from slowfast_lara.experiments.study_results import collect, write
from slowfast_lara.experiments.study_rows import ABLATION, VIDEO, Table
from slowfast_lara.experiments.study_runs import make_set, plan, run_all

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


def study(args: argparse.Namespace) -> str:
    """Do a study as the flags of `slowfast-lara compare-attention` say; its table."""
    table = _chosen(ABLATION if args.ablation else VIDEO, args.rows)
    seeds = list(range(args.seeds))
    work = Path(args.work).resolve()
    given = {"train": args.train, "val": args.val, "test": args.test}
    videos = {**VIDEOS, **{split: count for split, count in given.items() if count}}
    opts = ["MODEL.NUM_CLASSES", str(videos["classes"]), *args.opts]
    runs = plan(table.rows, seeds, work, opts)
    make_set(work / "data", videos)
    run_all(runs, args.jobs)
    name = "ablation" if args.ablation else "compare_attention"
    contents = ", ".join(f"{key} {value}" for key, value in videos.items())
    notes = [f"`{_command(args, videos)}`", f"Set: {contents}"]
    return write(Path(args.out) / name, table, collect(runs), seeds, notes)


def _command(args: argparse.Namespace, videos: dict[str, int]) -> str:
    """What makes the same table."""
    words = ["slowfast-lara compare-attention"]
    words += ["--ablation"] if args.ablation else []
    words += ["--rows", *args.rows] if args.rows else []
    words += ["--seeds", args.seeds]
    words += [word for split in ("train", "val", "test") for word in (f"--{split}", videos[split])]
    words += ["--opts", *args.opts] if args.opts else []
    return " ".join(map(str, words))


def _chosen(table: Table, names: Sequence[str] | None) -> Table:
    known = {row.name: row for row in table.rows}
    for name in names or ():
        if name not in known:
            raise InputError(f"unknown row {name!r}; known: {', '.join(known)}")
    return table._replace(rows=tuple(r for r in table.rows if not names or r.name in names))
