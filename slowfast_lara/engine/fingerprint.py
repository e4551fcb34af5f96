"""Fingerprint of a run: the config, code and video lists, which must be equal on all ranks."""

from __future__ import annotations

import hashlib
import sys
from importlib import metadata
from pathlib import Path

import torch
from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.config.keys import all_keys, get_value
from slowfast_lara.data.dataset import MODES
from slowfast_lara.data.epickitchens import annotation_files
from slowfast_lara.data.ssv2 import PREFIX
from slowfast_lara.files import check_regular_file
from slowfast_lara.models.build import device_of
from slowfast_lara.models.numerics import autocast_dtype
from slowfast_lara.user_code import imported

# Config keys that may differ between nodes, because they do not affect the results. The paths in
# IMPORTS may differ, but the imported files must be equal (`_imported_hashes`).
MAY_DIFFER = ("SHARD_ID", "DATA_LOADER.NUM_WORKERS", "DATA_LOADER.PIN_MEMORY", "IMPORTS")
_SSV2 = (f"{PREFIX}{name}.json" for name in ("labels", "train", "validation"))
LISTS = ("train.csv", "val.csv", "test.csv", *_SSV2)
MAX_NAMED = 8  # largest number of differences in an error message


def run_fingerprint(cfg: CfgNode, world_size: int) -> dict[str, str]:
    """Return the values that must be equal on all ranks, by name."""
    return {
        "the world size": str(world_size),
        **code_versions(),
        "torch": torch.__version__,
        "pyslowfast": metadata.version("pyslowfast"),
        **{key: repr(get_value(cfg, key)) for key in all_keys() if key not in MAY_DIFFER},
        # With SOLVER.PRECISION auto, the dtype depends on the GPU of a rank.
        "the autocast dtype": str(autocast_dtype(cfg, device_of(cfg))),
        **{name: _list_hash(Path(cfg.DATA.PATH_TO_DATA_DIR, name)) for name in LISTS},
        **{
            f"the annotations for {mode}": " ".join(map(_list_hash, annotation_files(cfg, mode)))
            for mode in MODES
        },
    }


def code_versions() -> dict[str, str]:
    """Return the versions of this package and of the user's modules, as they are on disk."""
    return {
        "the code": f"{slowfast_lara.__version__} ({_code_hash()})",
        **{f"the imported {name}": digest for name, digest in _imported_hashes().items()},
    }


def differences(ours: dict[str, str], rank0: dict[str, str], rank: int) -> str:
    """Describe how the fingerprint of `rank` differs from that of rank 0; "" if they are equal."""
    keys = [key for key in rank0 | ours if ours.get(key) != rank0.get(key)]
    parts = [
        f"{key} is {ours.get(key, 'missing'):.200} on rank {rank} and "
        f"{rank0.get(key, 'missing'):.200} on rank 0"
        for key in keys[:MAX_NAMED]
    ]
    if len(keys) > MAX_NAMED:
        parts.append(f"{len(keys) - MAX_NAMED} more differ")
    return "; ".join(parts)


def _code_hash() -> str:
    folder = Path(slowfast_lara.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _imported_hashes() -> dict[str, str]:
    """Hashes of the files of the user's modules, by module name."""
    hashes = {}
    for name in imported():
        name = Path(name).stem if name.endswith(".py") else name
        if file := sys.modules[name].__file__:
            hashes[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return hashes


def _list_hash(path: str | Path) -> str:
    try:
        check_regular_file(path)
        content = Path(path).read_bytes()
    except OSError as error:  # the loader raises an error if it needs the file
        return f"unreadable ({error.strerror})"
    lines = content.count(b"\n")
    return f"{lines} lines ({hashlib.sha256(content).hexdigest()[:12]})"
