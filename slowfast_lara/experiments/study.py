"""A study: every attention trained and tested on one synthetic set, over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slowfast_lara.errors import InputError
from slowfast_lara.experiments.study_results import collect, write
from slowfast_lara.experiments.study_rows import ABLATION, VIDEO, StudyTable
from slowfast_lara.experiments.study_runs import make_set, plan, run_all

# The sets: twelve motions at 64 pixels, as many videos as the configs of a protocol expect.
_SET = {"classes": 12, "size": 64, "frames": 16, "seed": 0}
VIDEOS = {
    "finetune": {**_SET, "train": 4096, "val": 240, "test": 960},  # configs/study/exact.yaml
    "scratch": {**_SET, "train": 8192, "val": 240, "test": 1920},  # configs/study/base.yaml
}


def study(
    *,
    protocol: str,
    ablation: bool,
    rows: Sequence[str] | None,
    seeds: int,
    jobs: int,
    work: str,
    out: str,
    train: int | None,
    val: int | None,
    test: int | None,
    opts: Sequence[str],
) -> str:
    """Do a study, as the flags of `slowfast-lara compare-attention` say; its table."""
    table = _chosen(ABLATION if ablation else VIDEO, rows)
    folder = Path(work).resolve()
    given = {"train": train, "val": val, "test": test}
    videos = {**VIDEOS[protocol], **{split: count for split, count in given.items() if count}}
    all_opts = ["MODEL.NUM_CLASSES", str(videos["classes"]), *opts]
    runs = plan(table.rows, range(seeds), folder, all_opts, protocol)
    make_set(folder / "data", videos)
    run_all(runs, jobs)
    words = ["slowfast-lara compare-attention", "--protocol", protocol]
    words += ["--ablation"] if ablation else []
    words += ["--rows", *rows] if rows else []
    words += ["--seeds", str(seeds)]
    words += [word for split in given for word in (f"--{split}", str(videos[split]))]
    words += ["--opts", *opts] if opts else []
    contents = ", ".join(f"{key} {value}" for key, value in videos.items())
    notes = [f"`{' '.join(words)}`", f"Set: {contents}"]
    name = "ablation" if ablation else "compare_attention"
    name += "_from_scratch" if protocol == "scratch" else ""
    return write(Path(out) / name, table, collect(runs), range(seeds), notes)


def _chosen(table: StudyTable, names: Sequence[str] | None) -> StudyTable:
    known = {row.name: row for row in table.rows}
    for name in names or ():
        if name not in known:
            raise InputError(f"unknown row {name!r}; known: {', '.join(known)}")
    return table._replace(rows=tuple(r for r in table.rows if not names or r.name in names))
