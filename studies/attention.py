"""Study of the attentions: train and test each one on a synthetic set, with several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slowfast_lara.errors import InputError
from studies.landmarks import write_landmarks
from studies.results import write
from studies.rows import ABLATION, LANDMARKS, VIDEO, StudyTable
from studies.runs import StudyRun, make_set, plan, run_all, write_finetune_lists

PARTS = {"compare_attention": VIDEO, "ablation": ABLATION, "landmarks": LANDMARKS}
# Twelve motions at 64 pixels. Each protocol has the number of videos that its config is made for.
_SET = {"classes": 12, "size": 64, "frames": 16, "seed": 0}
VIDEOS = {
    "finetune": {**_SET, "train": 4096, "val": 240, "test": 960},  # configs/study/exact.yaml
    "scratch": {**_SET, "train": 8192, "val": 240, "test": 1920},  # configs/study/base.yaml
}
# With 8 classes, a video has one object. Small models learn too little from textured videos with
# two objects.
TEXTURED_CLASSES = 8


def study(
    *,
    part: str,
    protocol: str,
    rows: Sequence[str] | None,
    seeds: int | None,
    jobs: int,
    work: str,
    out: str,
    textures: str | None,
    train: int | None,
    val: int | None,
    test: int | None,
    opts: Sequence[str],
) -> str:
    """Run `python -m studies attention` with these flags; returns the tables as Markdown."""
    for flag, value, known in (("part", part, (*PARTS, "all")), ("protocol", protocol, VIDEOS)):
        if value not in known:
            raise InputError(f"--{flag} is {value!r}; must be one of {', '.join(known)}")
    parts = list(PARTS) if part == "all" else [part]
    if protocol == "scratch" and "landmarks" in parts:
        raise InputError(
            "--part landmarks needs --protocol finetune; choose another --part for scratch"
        )
    tables = {name: _with_rows(PARTS[name], rows) for name in parts}
    folder = Path(work).resolve()
    given = {"train": train, "val": val, "test": test}
    videos: dict[str, int | str] = {**VIDEOS[protocol]}
    videos.update({split: count for split, count in given.items() if count})
    if textures:
        videos.update(classes=TEXTURED_CLASSES, textures=str(Path(textures).resolve()))
    all_opts = ["MODEL.NUM_CLASSES", str(videos["classes"]), *opts]
    # Plan all runs before making videos, so that a wrong config key is reported at once.
    plans = {
        name: plan(table.rows, range(seeds or table.seeds), folder, all_opts, protocol)
        for name, table in tables.items()
    }
    make_set(folder / "data", videos)
    write_finetune_lists(folder / "data")
    words = ["--protocol", protocol]
    words += ["--rows", *rows] if rows else []
    words += ["--textures", "FOLDER"] if textures else []
    words += [word for split in given for word in (f"--{split}", str(videos[split]))]
    words += ["--opts", *opts] if opts else []
    contents = ", ".join(f"{key} {value}" for key, value in videos.items() if key != "textures")
    ending = ("_textures" if textures else "") + ("_from_scratch" if protocol == "scratch" else "")
    texts = []
    for name, table in tables.items():
        run_all(_pretraining(plans[name]) if name == "landmarks" else plans[name], jobs)
        numbers = range(seeds or table.seeds)
        first_words = ["python -m studies attention", "--part", name, "--seeds"]
        command = " ".join([*first_words, str(len(numbers)), *words])
        notes = [f"`{command}`", f"Set: {contents}"]
        write_part = write_landmarks if name == "landmarks" else write
        path = Path(out) / (name + ending)
        texts.append(write_part(path, table, plans[name], numbers, notes))
    return "\n".join(texts)


def _pretraining(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """The runs that provide the initial weights of `runs`."""
    initial = {run.initial_run.folder: run.initial_run for run in runs if run.initial_run}
    return list(initial.values())


def _with_rows(table: StudyTable, names: Sequence[str] | None) -> StudyTable:
    known = {row.name: row for row in table.rows}
    for name in names or ():
        if name not in known:
            raise InputError(f"--rows is {name!r}; must be one of {', '.join(known)}")
    # The landmarks are compared with exact attention, their first row.
    always = [table.rows[0].name] if table is LANDMARKS else []
    chosen = [*always, *names] if names else known
    return table._replace(rows=tuple(row for row in table.rows if row.name in chosen))
