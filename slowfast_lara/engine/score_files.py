"""The scores of a test on the disk as they come, so that a test that was cut short goes on.

Each process adds to a file of its own in OUTPUT_DIR: a line of JSON that says of which
test it is, then a record for each video. A record has the index of the video in the list
and its number of views (int64), its scores (float32), and a checksum (CRC-32) of these,
all little-endian. A process that is killed may leave its last record torn: reading ends
there, and the video is scored again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import nn

import slowfast_lara
from slowfast_lara.errors import RunError
from slowfast_lara.files import make_folder, parse_json, remove_empty

_PLACE = struct.Struct("<qq")
_CHECKSUM = struct.Struct("<I")
# What may change while a test is cut short: it changes no score.
_MAY_CHANGE = (
    "TRAIN",
    "SOLVER",
    "MIXUP",
    "TENSORBOARD",
    "DATA_LOADER",
    "OUTPUT_DIR",
    "LOG_PERIOD",
    "NUM_GPUS",
    "NUM_SHARDS",
    "SHARD_ID",
    "DIST_BACKEND",
    "DIST_TIMEOUT",
)
_MAY_CHANGE_IN_TEST = ("ENABLE", "SAVE_RESULTS_PATH", "CHECKPOINT_FILE_PATH")


class Score(NamedTuple):
    """What is kept of a video: the mean `scores` [classes] over its views."""

    num_views: int
    scores: np.ndarray


def identity_of_test(
    model: nn.Module, paths: Sequence[str], labels: Sequence[int], cfg: CfgNode
) -> str:
    """A digest of all that makes the scores: the weights, the list, the config, the code."""
    settings: dict[str, Any] = {key: cfg[key] for key in cfg if key not in _MAY_CHANGE}
    settings["TEST"] = {key: cfg.TEST[key] for key in cfg.TEST if key not in _MAY_CHANGE_IN_TEST}
    precision = cfg.SOLVER.USE_MIXED_PRECISION, cfg.SOLVER.PRECISION, cfg.NUM_GPUS > 0
    versions = slowfast_lara.__version__, torch.__version__
    told = [settings, precision, versions, list(paths), [int(label) for label in labels]]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, state in model.state_dict().items():
        digest.update(f"{name} {state.dtype} {list(state.shape)}\n".encode())
        digest.update(state.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class ScoreFiles:
    """The files of the test `identity` in a folder: those that are there, and a new one."""

    def __init__(self, folder: str, identity: str) -> None:
        self._folder, self._identity = Path(folder), identity
        self._found: list[Path] = []
        self.others: list[Path] = []  # of another test
        self._file: BinaryIO | None = None
        self._made: list[str] = []
        self._path = self._folder / f"test_scores.{secrets.token_hex(6)}.part"

    def read(self) -> dict[int, Score]:
        """What earlier processes of this test have left, by the index of the video."""
        scores: dict[int, Score] = {}
        for path in sorted(self._folder.glob("test_scores.*.part")):
            header, _, records = path.read_bytes().partition(b"\n")
            num_classes = self._classes_in(header)
            (self.others if num_classes is None else self._found).append(path)
            if num_classes is not None:
                scores |= _read_records(records, num_classes)
        return scores

    def _classes_in(self, header: bytes) -> int | None:
        """The number of classes; None for the header of another test, or a torn one."""
        try:
            told = parse_json(header.decode())
            classes = told["classes"] if told["test"] == self._identity else None
        except (ValueError, TypeError, KeyError):
            return None
        return classes if type(classes) is int and classes > 0 else None

    def add(self, index: int, score: Score) -> None:
        """Write a score so that it outlives this process."""
        scores = score.scores.astype("<f4")
        record = _PLACE.pack(index, score.num_views) + scores.tobytes()
        try:
            if self._file is None:
                # The other machines of a run may have no OUTPUT_DIR of their own yet.
                self._made = make_folder(self._folder)
                self._file = open(self._path, "xb")  # noqa: SIM115  # closed by `remove`
                header = {"test": self._identity, "classes": len(scores)}
                self._file.write(json.dumps(header).encode() + b"\n")
            self._file.write(record + _CHECKSUM.pack(zlib.crc32(record)))
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"cannot write {self._path}: {error.strerror}; the scores before this one are "
                "kept: the same command goes on from there"
            ) from None

    def remove_others(self) -> None:
        _remove(self.others)

    def remove(self) -> None:
        """Remove all files of this test, once its results are written."""
        if self._file is not None:
            self._file.close()
        _remove([*self._found, self._path])
        remove_empty(self._made)


def _read_records(records: bytes, num_classes: int) -> dict[int, Score]:
    scores = {}
    size = _PLACE.size + 4 * num_classes
    for start in range(0, len(records), size + _CHECKSUM.size):
        record = records[start : start + size]
        checksum = records[start + size : start + size + _CHECKSUM.size]
        if checksum != _CHECKSUM.pack(zlib.crc32(record)):
            break
        index, num_views = _PLACE.unpack_from(record)
        scores[index] = Score(num_views, np.frombuffer(record, "<f4", offset=_PLACE.size))
    return scores


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            os.remove(path)
