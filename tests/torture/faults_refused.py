"""Faults of what is given: keys, lists, configs and checkpoints that must be refused."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.torture.case import Case
from tests.torture.faults import fault
from tests.torture.faults_files import FURTHEST, damaged, remove
from tests.torture.setting import read_checkpoint

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


@fault("a key that changes numbers", "whole", weight=2)
def changed_key(case: Case, rng: random.Random) -> str | None:
    key, value = rng.choice(sorted(KEYS.items(), key=lambda item: item[0]))
    testing = rng.random() < 0.3 and key in ("VIT.NUM_HEADS", "DATA.MEAN", "VIT.APPROX_ATTN_DIM")
    if case.newest() is None:
        return None
    changes = {key.replace(".", "__"): value}
    if testing:
        changes["TRAIN__ENABLE"] = False
    return case.refused(f"{key} is ", changes)


def _own_lists(case: Case) -> Path:
    """The lists in a folder of their own, to be changed."""
    folder = case.folder / "lists"
    folder.mkdir()
    case.undo.append(lambda: shutil.rmtree(folder))
    for split in ("train", "val", "test"):
        shutil.copy(case.data / f"{split}.csv", folder)
    return folder


@fault("a changed list", "whole", weight=2)
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
    return case.refused("the training list is ", {"data": lists})


@fault("a hostile list", "whole", weight=2)
def hostile_list(case: Case, rng: random.Random) -> str:
    lists = _own_lists(case)
    path = lists / rng.choice(["train.csv", "val.csv", "test.csv"])
    good = path.read_text()
    path.unlink()
    kind = rng.choice(["pipe", "device", "folder", "circle", "absent", *_LISTS])
    if not _make_odd(path, kind):
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
    "long line": lambda good, rng: b"a" * 3_000_000,
}


def _make_odd(path: Path, kind: str) -> bool:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "circle":
        path.symlink_to(path)
    return kind in ("pipe", "device", "folder", "circle", "absent")


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)
_CONFIGS = {
    "aliases": _BOMB,
    "code": "TRAIN: !!python/object/apply:os.mkdir [{canary}]\n",
    "itself": "_BASE_: {path}\n",
    "device as base": "_BASE_: /dev/zero\n",
    "long number": f"RNG_SEED: {'9' * 5000}\n",
    "deep": "[" * 20000,
    "noise": "\x00\x01\x02",
    "list": "- 1\n- 2\n",
    "unknown key": "TRIAN: {{ENABLE: True}}\n",
    "escapes": 'TRAIN: {{DATASET: "\\e[31mx\\a"}}\n',
    "wrong type": "SOLVER: {{MAX_EPOCH: [1, {{}}]}}\n",
    "infinite": "SOLVER: {{BASE_LR: .inf}}\n",
    "alias of itself": "TRAIN: &a {{DATASET: *a}}\n",
}


@fault("a hostile config", "whole", weight=2)
def hostile_config(case: Case, rng: random.Random) -> str:
    path, canary = case.folder / "hostile.yaml", case.folder / "the code was run"
    case.undo.append(lambda: remove(path))
    # A pipe is none of them: `--cfg <(...)` is one, and is waited for as by any command.
    kind = rng.choice(["device", "folder", "circle", "absent", *_CONFIGS])
    if not _make_odd(path, kind):
        text = _CONFIGS[kind]
        if kind not in ("aliases", "deep"):
            text = text.format(path=path, canary=canary)
        path.write_text(text)
    ended = case.refused("", config=path)
    case.never(canary)
    return ended


_JSON = {
    "deep": "[" * 100_000,
    "long number": '{"a": ' + "9" * 6000 + "}",
    "not a number": '{"a": NaN}',
    "list": "[1, 2]",
    "cut": '{"a": "0", ',
    "noise": "\x00\x01",
    "empty": "",
    "nested": '{"a": {"b": []}}',
}


@fault("hostile JSON", "whole")
def hostile_json(case: Case, rng: random.Random) -> str:
    """The lists of Something-Something are JSON."""
    folder = case.folder / "json"
    folder.mkdir()
    case.undo.append(lambda: shutil.rmtree(folder))
    for name in ("labels", "train", "validation"):
        path = folder / f"something-something-v2-{name}.json"
        kind = rng.choice(["pipe", "device", "folder", "circle", "absent", *_JSON])
        if not _make_odd(path, kind):
            path.write_text(_JSON[kind])
    return case.refused("", {"data": folder, "TRAIN__DATASET": "ssv2", "TEST__DATASET": "ssv2"})


@fault("a foreign checkpoint", "whole", weight=1.5)
def foreign(case: Case, rng: random.Random) -> str | None:
    """Whole and readable, but of another model or experiment: it is not passed over."""
    kind = rng.choice(["other weights", "other shapes", "other config", "other list"])
    name = case.newest()
    if name is None:
        return None
    content, mention = read_checkpoint(case.out.checkpoints / name), "does not fit"
    states = content["model_state"]
    if kind == "other weights":
        content, mention = {"model_state": {"w": torch.zeros(3)}, "epoch": 98}, "does not fit"
    elif kind == "other shapes":
        first = next(iter(states))
        content["model_state"] = {**states, first: torch.zeros(1, 2, 3)}
        mention = first
    elif kind == "other config":
        content["cfg"] = content["cfg"].replace("MAX_EPOCH: 6", "MAX_EPOCH: 60")
        mention = "SOLVER.MAX_EPOCH was 60, is now 6"
    else:
        content["train_list"], mention = "7 videos, sha256 0", "the training list was '7 videos"
    path = case.out.checkpoints / FURTHEST
    torch.save(content, path)
    case.undo.append(path.unlink)
    damaged(case, FURTHEST)  # for us: nothing may go on from it
    return case.refused(mention)
