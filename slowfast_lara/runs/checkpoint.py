"""Checkpoints of a run: names, atomic writing, safe reading, loading into a model.

PySlowFast's `save_checkpoint` is not used, because it writes in place: after a crash,
`get_last_checkpoint` may pick an incomplete file.

File names follow PySlowFast and sort by progress: `checkpoint_epoch_00002.pyth` after two epochs,
`checkpoint_epoch_00002_sample_000000480.pyth` after 480 samples of the third epoch. The names
count samples, because a run may resume with another batch size. PySlowFast loads any file with
"checkpoint" in its name, so no other file has this word in its name.

Earlier versions counted batches: `checkpoint_epoch_00002_iter_000120.pyth`. For such a file, the
number of samples is computed from the batch size that it contains.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from slowfast.utils.checkpoint import get_checkpoint_dir
from torch import nn

from slowfast_lara.errors import CheckpointError, WeightsError, first_line
from slowfast_lara.files import atomic_write, check_regular_file
from slowfast_lara.models.weights.files import EMA_STATE, bare_names, plain_weights, read_torch_file

logger = logging.getLogger(__name__)

BEST_NAME = "best.pyth"
# The state-dict names of an estimator's parameters and buffers contain this part.
ESTIMATOR_PART = ".attn.estimator."
_NAME = re.compile(
    r"checkpoint_epoch_(?P<epochs>\d{5,})"
    r"(?:_sample_(?P<samples>\d{9,})|_iter_(?P<batches>\d{6,}))?\.pyth"
)


class TrainedAttention(Enum):
    """Whether weights were trained with the attention of the model that they are loaded into."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TrainingPosition:
    """Progress of a training run: completed epochs, and completed batches of the next epoch."""

    epochs: int = 0
    batches: int = 0


def path_of(output_dir: str, position: TrainingPosition, global_batch: int) -> str:
    samples = position.batches * global_batch
    suffix = f"_sample_{samples:09d}" if samples else ""
    name = f"checkpoint_epoch_{position.epochs:05d}{suffix}.pyth"
    return os.path.join(get_checkpoint_dir(output_dir), name)


def best_path(output_dir: str) -> str:
    return os.path.join(get_checkpoint_dir(output_dir), BEST_NAME)


def paths_in(output_dir: str) -> list[str]:
    """Return the checkpoints of a run, except best.pyth, the one with the most progress last."""
    return _sorted_by_progress(get_checkpoint_dir(output_dir))


def _sorted_by_progress(folder: str) -> list[str]:
    """Return the checkpoints in a folder, the one with the most progress last."""
    keys = {}
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        if match := _NAME.fullmatch(name):
            path = os.path.join(folder, name)
            keys[path] = int(match["epochs"]), _samples(path, match), path
    return sorted(keys, key=keys.__getitem__)


def _samples(path: str, name: re.Match[str]) -> int:
    """Return the number of samples trained in the incomplete epoch.

    If an old file lacks its batch size, return its number of batches.
    """
    if name["batches"] is None:
        return int(name["samples"] or 0)
    global_batch = peek_checkpoint(path).get("global_batch")
    return int(name["batches"]) * (global_batch if type(global_batch) is int else 1)


def save(path: str, content: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    try:
        with atomic_write(path) as temporary:
            torch.save(content, temporary)
    except (OSError, RuntimeError) as error:
        # On a full disk, torch.save raises a RuntimeError when it closes the file.
        raise OSError(f"cannot write checkpoint {path}: {first_line(error)}") from error


def prune(written: str, keep: int) -> None:
    """Remove old checkpoints: keep `written` and the `keep` - 1 before it; `keep` 0 keeps all.

    A checkpoint with more progress than `written` was unreadable when this run started: otherwise
    the run would have resumed from it. It is kept until the run has made more progress.
    """
    paths = _sorted_by_progress(os.path.dirname(written))
    for path in paths[: paths.index(written) + 1][:-keep] if keep else []:
        os.remove(path)


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint to the CPU; no code in it is executed."""
    content = read_torch_file(path)
    states = content.get("model_state") if isinstance(content, dict) else None
    if not isinstance(states, dict) or not all(map(torch.is_tensor, states.values())):
        raise CheckpointError(f"cannot read checkpoint {path}: it has no valid 'model_state'")
    for key, least in (("epoch", -1), ("iteration", 0), ("global_batch", 1), ("ema_steps", 0)):
        value = content.get(key, least)
        if type(value) is not int or not least <= value < 2**31:
            # Show only the type of most values: containers may have a very long repr, and Python
            # cannot print huge integers.
            shown = f"{value!r:.40}" if type(value) in (str, float) else type(value).__name__
            raise CheckpointError(
                f"cannot read checkpoint {path}: {key!r} must be an integer from {least} to "
                f"2**31 - 1, got {shown}"
            )
    for key in ("optimizer_state", "scaler_state"):
        if not isinstance(content.get(key) or {}, dict):
            raise CheckpointError(f"cannot read checkpoint {path}: {key!r} must be a dictionary")
    if EMA_STATE in content:
        plain_weights(content[EMA_STATE], path)
    return content


def peek_checkpoint(path: str) -> dict[str, Any]:
    """Return the content of a checkpoint, memory-mapped if possible; {} if it cannot be read."""
    try:
        check_regular_file(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, UnicodeError):  # legacy files and some file names do not support mmap
            content = read_torch_file(path)
    except Exception:  # any type: zipfile, pickle or torch may fail on a damaged file
        return {}
    return content if isinstance(content, dict) else {}


def newest(output_dir: str) -> tuple[str, dict[str, Any]] | None:
    """Return path and content of a run's newest readable checkpoint; None if there is none.

    Log a warning for each newer checkpoint that is unreadable.
    """
    return _first_readable(reversed(paths_in(output_dir)))


def best_or_newest(output_dir: str) -> tuple[str, dict[str, Any]] | None:
    """Return path and content for inference: best.pyth if it is readable, else as `newest`."""
    best, others = best_path(output_dir), paths_in(output_dir)
    return _first_readable([*([best] if os.path.isfile(best) else []), *reversed(others)])


def _first_readable(paths: Iterable[str]) -> tuple[str, dict[str, Any]] | None:
    for path in paths:
        try:
            return path, load(path)
        except WeightsError as error:
            logger.warning("Skipping an unreadable checkpoint: %s", error)
    return None


def position_of(path: str, content: dict[str, Any], global_batch: int) -> TrainingPosition:
    """Return the progress of a checkpoint, in batches of `global_batch` samples (of all ranks).

    An incomplete batch is not counted.
    """
    if "epoch" not in content:
        raise CheckpointError(f"cannot resume from checkpoint {path}: it has no 'epoch'")
    # PySlowFast's "epoch" is the index of the last completed epoch.
    samples = content.get("iteration", 0) * content.get("global_batch", global_batch)
    return TrainingPosition(content["epoch"] + 1, samples // global_batch)


def weights_to_use(
    content: dict[str, Any], path: str, *, averaged: bool
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the EMA weights and True if `averaged` and present, else the raw weights and False."""
    if EMA_STATE not in content:
        return content["model_state"], False
    logger.info("Using the %s weights of %s", "EMA" if averaged else "raw (not EMA)", path)
    return plain_weights(content[EMA_STATE if averaged else "model_state"], path), averaged


def load_weights(
    model: nn.Module,
    states: dict[str, torch.Tensor],
    path: str,
    attention: TrainedAttention = TrainedAttention.SAME,
) -> list[str]:
    """Load the weights of a checkpoint into a model without DDP wrapper.

    If a name or shape does not fit, raise CheckpointError and leave the model unchanged. If
    `attention` is OTHER, the model's estimator buffers keep their seeded values (drawn from
    RNG_SEED). If `attention` is UNKNOWN, a buffer keeps its seeded value only if `states` lacks the
    buffer or has it in another shape. In both cases, estimator weights that the model lacks are
    ignored.

    Returns:
        The names of the buffers that keep their seeded values.
    """
    states, own = bare_names(states, path), model.state_dict()
    kept: list[str] = []
    if attention != TrainedAttention.SAME:
        for name, buffer in model.named_buffers():
            fits = name in states and states[name].shape == buffer.shape
            if ESTIMATOR_PART in name and (attention == TrainedAttention.OTHER or not fits):
                kept.append(name)
        unused = [name for name in states if ESTIMATOR_PART in name and name not in own]
        if unused:
            logger.info("Ignoring unused weights in %s: %s", path, ", ".join(unused))
        states = {name: x for name, x in states.items() if name not in unused}
        states |= {name: own[name] for name in kept}
    if kept:
        logger.info("Keeping seeded buffers instead of those in %s: %s", path, ", ".join(kept))
    check_fit(own, states, path)
    model.load_state_dict(states)
    return kept


def check_fit(own: dict[str, torch.Tensor], states: dict[str, torch.Tensor], path: str) -> None:
    """Raise CheckpointError if the names or shapes of `states` differ from the model's (`own`)."""
    problems = [f"it has no {name}" for name in own if name not in states]
    problems += [
        f"{name if name.isprintable() else repr(name):.100} is not in the model"
        for name in states
        if name not in own
    ]
    problems += [
        f"{name} is {list(states[name].shape)} instead of {list(own[name].shape)}"
        for name in own
        if name in states and states[name].shape != own[name].shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {'; '.join(problems[:3])}{more}"
        )
