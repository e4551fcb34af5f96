"""Damaged, foreign and hostile checkpoints, scores and videos."""

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
from tests.torture.workload import content_digest, read_checkpoint

MOST_PROGRESS = "checkpoint_epoch_00099.pyth"


def _newest(case: Case) -> tuple[str, Path] | None:
    name = case.newest()
    return (name, case.out.checkpoints / name) if name else None


def mark_damaged(case: Case, name: str) -> None:
    case.damaged[name] = os.lstat(case.out.checkpoints / name).st_ino


def _temporary_path(case: Case, name: str) -> Path:
    """Return a path in the checkpoint folder that is removed after the run."""
    path = case.out.checkpoints / name
    path.parent.mkdir(parents=True, exist_ok=True)
    case.undo.append(lambda: remove(path))
    return path


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@fault("truncated checkpoint", "before", weight=2)
def torn(case: Case, rng: random.Random) -> bool:
    if not (found := _newest(case)):
        return False
    name, path = found
    os.truncate(path, int(rng.random() * path.stat().st_size))
    mark_damaged(case, name)
    return True


@fault("flipped bits in a checkpoint", "before", weight=2)
def flipped(case: Case, rng: random.Random) -> bool:
    if not (found := _newest(case)):
        return False
    name, path = found
    before = content_digest(read_checkpoint(path))
    content = bytearray(path.read_bytes())
    for _ in range(200):  # a flip may be in the padding between tensors
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            if content_digest(read_checkpoint(path)) == before:
                continue
        except Exception:  # unreadable, in zipfile, pickle or torch
            pass
        break
    mark_damaged(case, name)
    return True


class _RunsCode:
    """Creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


@fault("checkpoint with code", "before")
def with_code(case: Case, rng: random.Random) -> bool:
    path, canary = _temporary_path(case, MOST_PROGRESS), case.folder / "code was executed"
    states = {"model_state": {}, "epoch": 98, "code": _RunsCode(canary)}
    if rng.random() < 0.5:
        torch.save(states, path)
    else:
        path.write_bytes(pickle.dumps(states))
    mark_damaged(case, MOST_PROGRESS)
    case.undo.append(lambda: case.check_not_executed(canary))
    return True


@fault("not a checkpoint", "before", weight=2)
def not_a_checkpoint(case: Case, rng: random.Random) -> bool:
    path = _temporary_path(case, MOST_PROGRESS)
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
    mark_damaged(case, MOST_PROGRESS)
    return True


@fault("checkpoint with an invalid field", "before")
def wrong_field(case: Case, rng: random.Random) -> bool:
    if not (found := _newest(case)):
        return False
    content = read_checkpoint(found[1])
    key, value = rng.choice(
        [("epoch", "x"), ("epoch", 1.5), ("epoch", 2**40), ("iteration", -3), ("global_batch", 0)]
        + [("optimizer_state", [1]), ("model_state", {"a": 1}), ("model_state", None)]
    )
    torch.save({**content, key: value}, _temporary_path(case, MOST_PROGRESS))
    mark_damaged(case, MOST_PROGRESS)
    return True


@fault("temporary files of a killed run", "before")
def temporary_files(case: Case, rng: random.Random) -> bool:
    for folder, suffix in ((case.out.checkpoints, ".pyth"), (case.out.path, ".yaml")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".writing-{rng.randbytes(6).hex()}{suffix}").write_bytes(rng.randbytes(100))
    (case.out.path / ".lock").write_bytes(rng.randbytes(50))
    return True


@fault("truncated scores", "before")
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
    path, original = case.videos / name, case.videos / f"{name}.original"
    path.rename(original)
    kind = rng.choice(["cut", "empty", "noise", "folder", "pipe", "circle", "absent"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "circle":
        path.symlink_to(path)
    elif kind != "absent":
        content = {"cut": original.read_bytes()[:500], "noise": rng.randbytes(5000), "empty": b""}
        path.write_bytes(content[kind])

    def restore() -> None:
        remove(path)
        original.rename(path)

    case.undo.append(restore)


@fault("broken test videos", "before")
def broken_test_videos(case: Case, rng: random.Random) -> bool:
    for number in rng.sample(range(1, 24), rng.randint(1, 3)):
        _break_video(case, f"test{number}.mp4", rng)
        case.broken_tests.add(f"test{number}.mp4")
    case.undo.append(case.broken_tests.clear)
    return True


@fault("broken validation video", "before")
def broken_val_video(case: Case, rng: random.Random) -> bool:
    _break_video(case, f"val{rng.randrange(5)}.mp4", rng)
    case.best_may_differ = True
    return True


@fault("broken training videos", "before", modes=("mixed",))
def broken_train_videos(case: Case, rng: random.Random) -> bool:
    """Other videos replace them in the batches, so that the weights differ from the reference."""
    for number in rng.sample(range(24), rng.randint(1, 2)):
        _break_video(case, f"train{number}.mp4", rng)
    case.best_may_differ = True
    return True
