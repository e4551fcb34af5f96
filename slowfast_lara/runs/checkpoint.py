"""Checkpoints that survive: written aside and renamed, read as data only.

PySlowFast's `save_checkpoint` writes in place, so that a crash leaves a torn
file, which its `get_last_checkpoint` then picks. Its names are kept, and sort by
progress: `checkpoint_epoch_00002.pyth` after two epochs, then
`checkpoint_epoch_00002_sample_000000480.pyth` within the third. Samples are counted,
not batches: a run may go on with batches of another size. No other file in the folder
has "checkpoint" in its name, which is what PySlowFast looks for.

Earlier versions counted batches: `checkpoint_epoch_00002_iter_000120.pyth`. Such a name
sorts before one with samples of the same epoch, which is right, because a run that goes on
from it gets further. Only where batches of several sizes left such names in one epoch is
PySlowFast, which sorts by name, wrong; here their content is asked.
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
# In the names of what an estimator of a block has of its own.
OF_ESTIMATOR = ".attn.estimator."
_NAME = re.compile(
    r"checkpoint_epoch_(?P<epochs>\d{5,})"
    r"(?:_sample_(?P<samples>\d{9,})|_iter_(?P<batches>\d{6,}))?\.pyth"
)


class TrainedAttention(Enum):
    """The attention that weights were trained with, beside that of the model they are for."""

    SAME = "same"
    OTHER = "other"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Position:
    """How far training is: whole epochs, and batches of the next one."""

    epochs: int = 0
    batches: int = 0


def save(path: str, content: dict[str, Any]) -> None:
    """Write a checkpoint whole, or leave the folder as it was."""
    try:
        with atomic_write(path) as aside:
            torch.save(content, aside)
    except (OSError, RuntimeError) as error:
        # On a full disk torch raises a RuntimeError about its archive, once closed.
        raise OSError(f"cannot write checkpoint {path}: {first_line(error)}") from error


def load(path: str) -> dict[str, Any]:
    """The content of a checkpoint file, on the CPU. No code in it is ever run."""
    content = read_torch_file(path)
    states = content.get("model_state") if isinstance(content, dict) else None
    if not isinstance(states, dict) or not all(map(torch.is_tensor, states.values())):
        raise CheckpointError(f"cannot read checkpoint {path}: it has no weights 'model_state'")
    _check_fields(content, path)
    return content


def _check_fields(content: dict[str, Any], path: str) -> None:
    """A CheckpointError if what training goes on from is there, and is not what it should be."""
    numbers = (("epoch", -1), ("iteration", 0), ("global_batch", 1), ("ema_steps", 0))
    for key, least in numbers:
        value = content.get(key, least)
        if type(value) is not int or not least <= value < 2**31:
            # Only text and fractions are shown: values within values may have no end.
            given = f"is {value!r:.40}" if type(value) in (str, float) else "is none"
            raise CheckpointError(
                f"cannot read checkpoint {path}: a whole number from {least} to 2**31 is expected "
                f"as its {key!r}, which {given}"
            )
    for key in ("optimizer_state", "scaler_state"):
        if not isinstance(content.get(key) or {}, dict):
            raise CheckpointError(f"cannot read checkpoint {path}: its {key!r} is no dictionary")
    if EMA_STATE in content:
        plain_weights(content[EMA_STATE], path)


def peek_checkpoint(path: str) -> dict[str, Any]:
    """What a checkpoint says besides its tensors, which are not read; {} if it cannot be read."""
    try:
        check_regular_file(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (
            RuntimeError,
            UnicodeError,
        ):  # PyTorch's older files, and some names, are not mapped
            content = read_torch_file(path)
    except Exception:  # a damaged file breaks zip, pickle or tensors, anywhere
        return {}
    return content if isinstance(content, dict) else {}


def newest(output_dir: str) -> tuple[str, dict[str, Any]] | None:
    """The newest readable checkpoint of a run; unreadable ones are reported."""
    return _first_readable(reversed(_sorted(get_checkpoint_dir(output_dir))))


def best_or_newest(output_dir: str) -> tuple[str, dict[str, Any]] | None:
    """The checkpoint to use a run by: that of the best validation if it was kept."""
    best, others = best_path(output_dir), reversed(_sorted(get_checkpoint_dir(output_dir)))
    return _first_readable([*([best] if os.path.isfile(best) else []), *others])


def _first_readable(paths: Iterable[str]) -> tuple[str, dict[str, Any]] | None:
    for path in paths:
        try:
            return path, load(path)
        except WeightsError as error:
            logger.warning("%s; passing over it", error)
    return None


def exist_in(output_dir: str) -> bool:
    return bool(_sorted(get_checkpoint_dir(output_dir)))


def position_of(path: str, content: dict[str, Any], global_batch: int) -> Position:
    """Where the checkpoint at a path stands, for batches of this size over all processes."""
    if "epoch" not in content:
        raise CheckpointError(f"checkpoint {path} cannot be continued: it has no 'epoch'")
    # PySlowFast's "epoch" is the index of the last whole epoch.
    batches = content.get("iteration", 0) * content.get("global_batch", global_batch)
    return Position(content["epoch"] + 1, batches // global_batch)


def prune(written: str, keep: int) -> None:
    """Remove all but `keep` checkpoints of a run (0: all stay): the one just written, and those
    before it.

    What seems to be further could not be read when this run began, or the run would have gone on
    from there. It is left alone until the run is past it.
    """
    paths = _sorted(os.path.dirname(written))
    for path in paths[: paths.index(written) + 1][:-keep] if keep else []:
        os.remove(path)


def path_of(output_dir: str, position: Position, global_batch: int) -> str:
    samples = position.batches * global_batch
    within = f"_sample_{samples:09d}" if samples else ""
    name = f"checkpoint_epoch_{position.epochs:05d}{within}.pyth"
    return os.path.join(get_checkpoint_dir(output_dir), name)


def best_path(output_dir: str) -> str:
    return os.path.join(get_checkpoint_dir(output_dir), BEST_NAME)


def weights_to_use(
    content: dict[str, Any], path: str, *, averaged: bool
) -> tuple[dict[str, torch.Tensor], bool]:
    """A checkpoint's weights, or their moving average where it has one; whether they are that."""
    if EMA_STATE not in content:
        return content["model_state"], False
    which = "moving average of the weights" if averaged else "weights, not their moving average"
    logger.info("Of %s, the %s", path, which)
    return plain_weights(content[EMA_STATE if averaged else "model_state"], path), averaged


def load_weights(
    model: nn.Module,
    states: dict[str, torch.Tensor],
    path: str,
    attention: TrainedAttention = TrainedAttention.SAME,
) -> list[str]:
    """Put a checkpoint's weights into a bare model, all of them or none.

    Where its attention is not that of the model, the buffers of the new one stay as its seed
    has made them, and what belonged to the old one is left out. Returns the names of the former.
    """
    states = bare_names(states, path)
    fresh: dict[str, torch.Tensor] = {}
    if attention != TrainedAttention.SAME:
        fresh = _new_buffers(model, states, attention)
        states = {**_without_unused(model, states, path), **fresh}
    if fresh:
        logger.info("With the weights of %s, start from their seed: %s", path, ", ".join(fresh))
    check_fit(model.state_dict(), states, path)
    model.load_state_dict(states)
    return list(fresh)


def check_fit(own: dict[str, torch.Tensor], states: dict[str, torch.Tensor], path: str) -> None:
    """Refuse weights that a model with `own` ones has no place for."""
    problems = [f"it has no {name}" for name in own if name not in states]
    problems += [f"{name} is not in the model" for name in states if name not in own]
    problems += [
        f"{name} is {list(states[name].shape)} in it and {list(own[name].shape)} in the model"
        for name in own
        if name in states and states[name].shape != own[name].shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: {'; '.join(problems[:3])}{more}"
        )


def _new_buffers(
    model: nn.Module, states: dict[str, torch.Tensor], attention: TrainedAttention
) -> dict[str, torch.Tensor]:
    other = attention == TrainedAttention.OTHER
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if OF_ESTIMATOR in name
        and (other or name not in states or states[name].shape != buffer.shape)
    }


def _without_unused(
    model: nn.Module, states: dict[str, torch.Tensor], path: str
) -> dict[str, torch.Tensor]:
    own = model.state_dict()
    unused = [name for name in states if OF_ESTIMATOR in name and name not in own]
    if unused:
        logger.info("Of the weights of %s, are not needed: %s", path, ", ".join(unused))
    return {name: x for name, x in states.items() if name not in unused}


def _sorted(folder: str) -> list[str]:
    """The checkpoints in a folder; the furthest is the last."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [
        (os.path.join(folder, name), match) for name in names if (match := _NAME.fullmatch(name))
    ]
    places = {path: (int(match["epochs"]), _samples(path, match)) for path, match in found}
    return sorted(places, key=lambda path: (places[path], path))


def _samples(path: str, name: re.Match[str]) -> int:
    """The samples of the epoch that was begun."""
    if name["batches"] is None:
        return int(name["samples"] or 0)
    batch = peek_checkpoint(path).get("global_batch")
    return int(name["batches"]) * (batch if type(batch) is int else 1)
