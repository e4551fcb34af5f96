"""Keys, lists, configs and checkpoints that a run must refuse."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.torture.case import Case
from tests.torture.faults import fault
from tests.torture.faults_files import MOST_PROGRESS, mark_damaged, remove
from tests.torture.workload import read_checkpoint

KEYS: dict[str, Any] = {
    "SOLVER.WEIGHT_DECAY": 0.25,
    "SOLVER.BASE_LR": 0.5,
    "SOLVER.OPTIMIZING_METHOD": "sgd",
    "SOLVER.MAX_EPOCH": 7,
    "SOLVER.SMOOTHING": 0.1,
    "RNG_SEED": 7,
    "VIT.DROP_PATH": 0.1,
    "VIT.NUM_HEADS": 4,
    "VIT.APPROX_ATTN_TYPE": "performer",
    "VIT.APPROX_ATTN_DIM": 2,
    "DATA.MEAN": [0.5, 0.5, 0.5],
    "DATA.SAMPLING_RATE": 1,
    "DATA.TRAIN_JITTER_SCALES": [36, 44],
}


@fault("changed key", "whole", weight=2)
def changed_key(case: Case, rng: random.Random) -> str | None:
    key, value = rng.choice(sorted(KEYS.items(), key=lambda item: item[0]))
    testing = rng.random() < 0.3 and key in ("VIT.NUM_HEADS", "DATA.MEAN", "VIT.APPROX_ATTN_DIM")
    if case.newest() is None:
        return None
    changes = {key.replace(".", "__"): value}
    if testing:
        changes["TRAIN__ENABLE"] = False
    return case.refused(key, changes)


def _own_lists(case: Case) -> Path:
    """Copy the lists to a temporary folder."""
    folder = case.folder / "lists"
    folder.mkdir()
    case.undo.append(lambda: shutil.rmtree(folder))
    for split in ("train", "val", "test"):
        shutil.copy(case.data / f"{split}.csv", folder)
    return folder


@fault("changed list", "whole", weight=2)
def changed_list(case: Case, rng: random.Random) -> str | None:
    change, line = rng.choice(["fewer", "more", "order", "label", "name"]), rng.randrange(23)
    if case.newest() is None:
        return None
    lists = _own_lists(case)
    lines = (lists / "train.csv").read_text().splitlines()
    path, label = lines[line].split()
    if change == "fewer":
        del lines[line]
    elif change == "more":
        lines.append(lines[line])
    elif change == "order":
        lines[line], lines[line + 1] = lines[line + 1], lines[line]
    elif change == "label":
        lines[line] = f"{path} {(int(label) + 1) % 3}"
    else:
        lines[line] = f"{path}x {label}"
    (lists / "train.csv").write_text("\n".join(lines))
    return case.refused("list", {"data": lists})


@fault("invalid list", "whole", weight=2)
def invalid_list(case: Case, rng: random.Random) -> str:
    lists = _own_lists(case)
    path = lists / rng.choice(["train.csv", "val.csv", "test.csv"])
    good = path.read_text()
    path.unlink()
    kind = rng.choice(["folder", "circle", "absent", *_LISTS])
    if not _make_unreadable(path, kind):
        path.write_bytes(_LISTS[kind](good, rng))
    return case.refused("", {"data": lists})


_LISTS = {
    "empty": lambda good, rng: b"",
    "blank": lambda good, rng: b"\n\n \n",
    "noise": lambda good, rng: b"\xff" + rng.randbytes(2000),
    "large label": lambda good, rng: f"{good}/a.mp4 99\n".encode(),
    "long label": lambda good, rng: f"{good}/a.mp4 {'9' * 6000}\n".encode(),
    "negative label": lambda good, rng: f"{good}/a.mp4 -1\n".encode(),
    "no label": lambda good, rng: f"{good}/a.mp4\n".encode(),
    "escapes": lambda good, rng: f"{good}\x1b[31m/a.mp4\x07 x\x1b]0;y\x07\n".encode(),
    "wrong folder": lambda good, rng: good.replace("/videos/", "/nowhere/").encode(),
    "latin-1": lambda good, rng: good.replace("train", "tr\xe4in").encode("latin-1") + b"\xe4 0\n",
}


def _make_unreadable(path: Path, kind: str) -> bool:
    if kind == "folder":
        path.mkdir()
    elif kind == "circle":
        path.symlink_to(path)
    return kind in ("folder", "circle", "absent")


_CONFIGS = {
    "code": "TRAIN: !!python/object/apply:os.mkdir [{canary}]\n",
    "itself": "_BASE_: {path}\n",
    "noise": "\x00\x01\x02",
    "list": "- 1\n- 2\n",
    "unknown key": "TRIAN: {{ENABLE: True}}\n",
    "escapes": 'TRAIN: {{DATASET: "\\e[31mx\\a"}}\n',
    "wrong type": "SOLVER: {{MAX_EPOCH: [1, {{}}]}}\n",
    "infinite": "SOLVER: {{BASE_LR: .inf}}\n",
}


@fault("invalid config", "whole", weight=2)
def invalid_config(case: Case, rng: random.Random) -> str:
    path, canary = case.folder / "invalid.yaml", case.folder / "code was executed"
    case.undo.append(lambda: remove(path))
    kind = rng.choice(["folder", "circle", "absent", *_CONFIGS])
    if not _make_unreadable(path, kind):
        path.write_text(_CONFIGS[kind].format(path=path, canary=canary))
    ended = case.refused("", config=path)
    case.check_not_executed(canary)
    return ended


_JSON = {
    "not a number": '{"a": NaN}',
    "list": "[1, 2]",
    "cut": '{"a": "0", ',
    "noise": "\x00\x01",
    "empty": "",
    "nested": '{"a": {"b": []}}',
}


@fault("invalid JSON", "whole")
def invalid_json(case: Case, rng: random.Random) -> str:
    """The lists of Something-Something v2 are JSON."""
    folder = case.folder / "json"
    folder.mkdir()
    case.undo.append(lambda: shutil.rmtree(folder))
    for name in ("labels", "train", "validation"):
        path = folder / f"something-something-v2-{name}.json"
        kind = rng.choice(["folder", "circle", "absent", *_JSON])
        if not _make_unreadable(path, kind):
            path.write_text(_JSON[kind])
    return case.refused("", {"data": folder, "TRAIN__DATASET": "ssv2", "TEST__DATASET": "ssv2"})


@fault("foreign checkpoint", "whole", weight=1.5)
def foreign(case: Case, rng: random.Random) -> str | None:
    """A readable checkpoint of another model or run: it must not be skipped."""
    kind = rng.choice(["other weights", "other shapes", "other config", "other list"])
    name = case.newest()
    if name is None:
        return None
    content, expected_text = read_checkpoint(case.out.checkpoints / name), "does not fit"
    states = content["model_state"]
    if kind == "other weights":
        content, expected_text = {"model_state": {"w": torch.zeros(3)}, "epoch": 98}, "does not fit"
    elif kind == "other shapes":
        first = next(iter(states))
        content["model_state"] = {**states, first: torch.zeros(1, 2, 3)}
        expected_text = first
    elif kind == "other config":
        content["cfg"] = content["cfg"].replace("MAX_EPOCH: 6", "MAX_EPOCH: 60")
        expected_text = "SOLVER.MAX_EPOCH"
    else:
        content["train_list"], expected_text = "7 videos, sha256 0", "7 videos"
    path = case.out.checkpoints / MOST_PROGRESS
    torch.save(content, path)
    case.undo.append(path.unlink)
    mark_damaged(case, MOST_PROGRESS)  # nothing may resume from it
    return case.refused(expected_text)
