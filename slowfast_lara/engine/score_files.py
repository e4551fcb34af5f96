"""Scores of a running test on disk, from which an interrupted test resumes.

Each process appends to its own file in OUTPUT_DIR. The file has a JSON header line that identifies
the test, then one little-endian record of fixed size per scored video; videos that failed have no
record. A record ends with a CRC-32. A killed process may leave an incomplete last record; its video
is then scored again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
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
from slowfast_lara.files import make_folder, remove_empty
from slowfast_lara.labels import Label

# Config nodes and keys that may change when a test resumes. The precision and the device type
# affect the scores; `scores_fingerprint` includes them separately.
_MAY_CHANGE = {"TRAIN", "SOLVER", "MIXUP", "TENSORBOARD", "DATA_LOADER", "OUTPUT_DIR", "LOG_PERIOD"}
_MAY_CHANGE |= {"WANDB", "NUM_GPUS", "NUM_SHARDS", "SHARD_ID", "DIST_BACKEND", "DIST_TIMEOUT"}
_MAY_CHANGE_IN_TEST = {"ENABLE", "SAVE_RESULTS_PATH", "CHECKPOINT_FILE_PATH"}
PATTERN = "test_scores.*.part"


class VideoResult(NamedTuple):
    """Scores [classes] of a tested video, averaged over views; None and a reason if it failed."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    num_views: int = 0
    scores: np.ndarray | None = None
    reason: str = ""


def scores_fingerprint(
    model: nn.Module, paths: Sequence[str], labels: Sequence[Label], cfg: CfgNode
) -> str:
    """Return a digest of all that determines the scores: weights, list, config, versions."""
    settings: dict[str, Any] = {key: cfg[key] for key in cfg if key not in _MAY_CHANGE}
    settings["TEST"] = {key: cfg.TEST[key] for key in cfg.TEST if key not in _MAY_CHANGE_IN_TEST}
    precision = cfg.SOLVER.USE_MIXED_PRECISION, cfg.SOLVER.PRECISION, cfg.NUM_GPUS > 0
    versions = slowfast_lara.__version__, torch.__version__
    content = [settings, precision, versions, list(paths), list(labels)]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    for name, state in model.state_dict().items():
        digest.update(f"{name} {state.dtype} {list(state.shape)}\n".encode())
        digest.update(state.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class ScoreFiles:
    """Score files of one test in a folder: those of interrupted attempts, and a new one."""

    def __init__(self, folder: str, fingerprint: str, num_classes: int) -> None:
        self._folder = Path(folder)
        self._header = json.dumps({"test": fingerprint, "classes": num_classes}).encode()
        scores = ("scores", "<f4", (num_classes,))
        self._dtype = np.dtype([("index", "<i8"), ("num_views", "<i8"), scores, ("crc", "<u4")])
        self._found: list[Path] = []
        self.of_other_tests: list[Path] = []
        self._file: BinaryIO | None = None
        self._made_folders: list[str] = []
        self._path = self._folder / PATTERN.replace("*", secrets.token_hex(6))

    def read(self) -> dict[int, VideoResult]:
        """Return the results saved by interrupted attempts of this test, by video index.

        Collect the score files of other tests in `of_other_tests`.
        """
        results: dict[int, VideoResult] = {}
        for path in sorted(self._folder.glob(PATTERN)):
            if not path.is_file():  # reading a FIFO would block
                continue
            header, _, content = path.read_bytes().partition(b"\n")
            if header != self._header:
                self.of_other_tests.append(path)
                continue
            self._found.append(path)
            count = len(content) // self._dtype.itemsize
            for record in np.frombuffer(content, self._dtype, count):
                if record["crc"] != _crc(record):
                    break
                index = int(record["index"])
                results[index] = VideoResult(index, int(record["num_views"]), record["scores"])
        return results

    def add(self, result: VideoResult) -> None:
        """Append the scores of a video to the file of this process."""
        record = np.zeros((), self._dtype)
        record["index"], record["num_views"], record["scores"] = result[:3]
        record["crc"] = _crc(record)
        try:
            if self._file is None:
                # OUTPUT_DIR may exist only on the node of rank 0.
                self._made_folders = make_folder(self._folder)
                self._file = open(self._path, "xb")  # noqa: SIM115  # closed by `remove`
                self._file.write(self._header + b"\n")
            self._file.write(record.tobytes())
            self._file.flush()
        except OSError as error:
            raise RunError(
                f"cannot write {self._path}: {error.strerror}; earlier scores are kept; the same "
                "command resumes the test"
            ) from None

    def remove(self) -> None:
        """Remove all files of this test, after its results are written."""
        if self._file is not None:
            self._file.close()
        remove_files([*self._found, self._path])
        remove_empty(self._made_folders)


def _crc(record: np.ndarray) -> int:
    return zlib.crc32(record.tobytes()[:-4])


def remove_files(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)  # another process may have removed the file
