"""Faults of files: checkpoints, scores and videos that are damaged, foreign or hostile."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.torture.case import Case
from tests.torture.faults import fault
from tests.torture.setting import content_sum, read_checkpoint

FURTHEST = "checkpoint_epoch_00099.pyth"


def _newest(case: Case) -> tuple[str, Path] | None:
    name = case.newest()
    return (name, case.out.checkpoints / name) if name else None


def damaged(case: Case, name: str) -> None:
    case.damaged[name] = os.lstat(case.out.checkpoints / name).st_ino


def _put(case: Case, name: str) -> Path:
    """Where a file that cannot be a checkpoint may be put, until the run has ended."""
    path = case.out.checkpoints / name
    path.parent.mkdir(parents=True, exist_ok=True)
    case.undo.append(lambda: remove(path))
    return path


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@fault("a torn checkpoint", "before", weight=2)
def torn(case: Case, rng: random.Random) -> bool:
    if not (found := _newest(case)):
        return False
    name, path = found
    os.truncate(path, int(rng.random() * path.stat().st_size))
    damaged(case, name)
    return True


@fault("flipped bits in a checkpoint", "before", weight=2)
def flipped(case: Case, rng: random.Random) -> bool:
    if not (found := _newest(case)):
        return False
    name, path = found
    before = content_sum(read_checkpoint(path))
    content = bytearray(path.read_bytes())
    for _ in range(200):  # one flip may be in the padding between tensors
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            if content_sum(read_checkpoint(path)) == before:
                continue
        except Exception:  # it can no longer be read, anywhere in zip, pickle or tensors
            pass
        break
    damaged(case, name)
    return True


class _Code:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@fault("a checkpoint with code", "before")
def with_code(case: Case, rng: random.Random) -> bool:
    path, canary = _put(case, FURTHEST), case.folder / "the code was run"
    states = {"model_state": {}, "epoch": 98, "code": _Code(canary)}
    if rng.random() < 0.5:
        torch.save(states, path)
    else:
        path.write_bytes(pickle.dumps(states))
    damaged(case, FURTHEST)
    case.undo.append(lambda: case.never(canary))
    return True


@fault("what is no checkpoint", "before", weight=2)
def no_checkpoint(case: Case, rng: random.Random) -> bool:
    path = _put(case, FURTHEST)
    kind = rng.choice(["empty", "noise", "zeros", "folder", "circle", "dangling", "pipe", "device"])
    if kind == "folder":
        path.mkdir()
    elif kind == "circle":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(case.folder / "absent")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "zeros":
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.write_bytes(rng.randbytes(10_000) if kind == "noise" else b"")
    damaged(case, FURTHEST)
    return True


@fault("a checkpoint with a wrong field", "before")
def wrong_field(case: Case, rng: random.Random) -> bool:
    if not (found := _newest(case)):
        return False
    content = read_checkpoint(found[1])
    key, value = rng.choice(
        [("epoch", "x"), ("epoch", 1.5), ("epoch", 2**40), ("iteration", -3), ("global_batch", 0)]
        + [("optimizer_state", [1]), ("model_state", {"a": 1}), ("model_state", None)]
    )
    torch.save({**content, key: value}, _put(case, FURTHEST))
    damaged(case, FURTHEST)
    return True


@fault("left-overs of a killed run", "before")
def left_overs(case: Case, rng: random.Random) -> bool:
    for folder, suffix in ((case.out.checkpoints, ".pyth"), (case.out.path, ".yaml")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".writing-{rng.randbytes(6).hex()}{suffix}").write_bytes(rng.randbytes(100))
    (case.out.path / ".lock").write_bytes(rng.randbytes(50))
    return True


@fault("torn scores", "before")
def torn_scores(case: Case, rng: random.Random) -> bool:
    paths = sorted(case.out.path.glob("test_scores.*.part"))
    if not case.out.path.exists():
        return False
    for path in paths:
        if rng.random() < 0.5:
            os.truncate(path, int(rng.random() * path.stat().st_size))
        else:
            with path.open("ab") as file:
                file.write(rng.randbytes(rng.randint(1, 200)))
    (case.out.path / "test_scores.noise.part").write_bytes(rng.randbytes(300))
    return True


def _break_video(case: Case, name: str, rng: random.Random) -> None:
    path, aside = case.videos / name, case.videos / f"{name}.whole"
    path.rename(aside)
    kind = rng.choice(["cut", "empty", "noise", "folder", "pipe", "circle", "absent"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "circle":
        path.symlink_to(path)
    elif kind != "absent":
        content = {"cut": aside.read_bytes()[:500], "noise": rng.randbytes(5000), "empty": b""}
        path.write_bytes(content[kind])

    def mend() -> None:
        remove(path)
        aside.rename(path)

    case.undo.append(mend)


@fault("broken videos to test", "before")
def broken_test_videos(case: Case, rng: random.Random) -> bool:
    for number in rng.sample(range(1, 24), rng.randint(1, 3)):
        _break_video(case, f"test{number}.mp4", rng)
        case.broken_tests.add(f"test{number}.mp4")
    case.undo.append(case.broken_tests.clear)
    return True


@fault("a broken video to validate", "before")
def broken_val_video(case: Case, rng: random.Random) -> bool:
    _break_video(case, f"val{rng.randrange(5)}.mp4", rng)
    case.best_may_differ = True
    return True


@fault("broken videos to train", "before", ways=("mixed",))
def broken_train_videos(case: Case, rng: random.Random) -> bool:
    """Others take their places, so that the bits are no longer those of the reference."""
    for number in rng.sample(range(24), rng.randint(1, 2)):
        _break_video(case, f"train{number}.mp4", rng)
    case.best_may_differ = True
    return True
