"""Rules for resuming: which settings may differ from those of the checkpoint.

A checkpoint holds its config and a fingerprint of its training list. Both are compared with those
of the run before the run writes any file. TRAIN.ACCEPT_CHANGES True accepts differences.

A run resumes from its OUTPUT_DIR. If OUTPUT_DIR has no checkpoint, the run resumes from the
checkpoint TRAIN.CHECKPOINT_FILE_PATH, as in PySlowFast. If TRAIN.CHECKPOINT_EPOCH_RESET is True,
the run loads only the weights of this checkpoint and trains from epoch 0. Users forget to set this
key, so every CheckpointError of a resume from TRAIN.CHECKPOINT_FILE_PATH names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.keys import Affects
from slowfast_lara.errors import CheckpointError
from slowfast_lara.labels import Label
from slowfast_lara.runs.checkpoint import TrainingPosition
from slowfast_lara.runs.saved_config import (
    Change,
    checkout_config,
    config_changes,
    describe,
    saved_config,
)

logger = logging.getLogger(__name__)


def list_fingerprint(paths: Sequence[str], labels: Sequence[Label]) -> str:
    """A fingerprint of a list of videos that does not depend on their common parent folder."""
    common = os.path.commonprefix([os.path.dirname(path) + os.sep for path in paths])
    start = common.rfind(os.sep) + 1
    lines = "\n".join(f"{path[start:]}\t{label}" for path, label in zip(paths, labels))
    return f"{len(paths)} videos, sha256 {hashlib.sha256(lines.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def resume_from_file(path: str) -> Iterator[None]:
    """Context manager that adds to a CheckpointError how to train from `path` without resuming."""
    try:
        yield
    except CheckpointError as error:
        reason = re.sub(f"^{re.escape(path)} ", "it ", str(error))
        raise CheckpointError(
            f"TRAIN.CHECKPOINT_FILE_PATH cannot resume from {path}: {reason}; to start a new "
            "training run from its weights, set TRAIN.CHECKPOINT_EPOCH_RESET True"
        ) from None


def check_resume_from_file(
    path: str, content: dict[str, Any], position: TrainingPosition, cfg: CfgNode, train_list: str
) -> None:
    """Raise CheckpointError if a run with `cfg` cannot resume from another run's checkpoint.

    Args:
        path: The checkpoint, for messages.
        content: The content of the checkpoint.
        position: The training position of the checkpoint.
        cfg: The config of the run.
        train_list: The fingerprint of the run's training list.
    """
    if checkout_config(content) is not None:
        raise CheckpointError(f"{path} was trained in a git checkout of PySlowFast or Motionformer")
    changes = _changes(content, cfg, train_list)
    known = saved_config(content) is not None and "train_list" in content
    if not cfg.TRAIN.ACCEPT_CHANGES and (changes or not known):
        reason = f"different settings: {describe(changes)}"
        if not changes:
            reason = "unknown settings: it holds no config or no fingerprint of the training list"
        raise CheckpointError(f"{path} was trained with {reason}")
    if position.epochs >= cfg.SOLVER.MAX_EPOCH:
        limit = f"SOLVER.MAX_EPOCH is {cfg.SOLVER.MAX_EPOCH}"
        raise CheckpointError(f"{path} was trained for {position.epochs} epochs, and {limit}")
    if changes:
        logger.warning("Accepting changed settings for %s: %s", path, describe(changes))


def check_resume(path: str, content: dict[str, Any], cfg: CfgNode, train_list: str) -> None:
    """Raise CheckpointError if changed settings affect the training, unless they are accepted.

    If the run resumes within an epoch and a new list or seed is accepted, the epoch continues at
    the same batch number, in the new order of the videos. If the epoch restarted, its old
    checkpoints would appear to be further ahead than the new ones.
    """
    if checkout_config(content) is not None:
        raise CheckpointError(
            f"{path} was trained in a git checkout of PySlowFast or Motionformer and cannot be "
            "resumed; to start from its weights, pass it as TRAIN.CHECKPOINT_FILE_PATH with "
            "TRAIN.CHECKPOINT_EPOCH_RESET True and another OUTPUT_DIR"
        )
    _refuse_unless_accepted(path, _changes(content, cfg, train_list), cfg)


def _changes(content: dict[str, Any], cfg: CfgNode, train_list: str) -> list[Change]:
    changes = config_changes(content, cfg, Affects.TRAINING)
    saved_list = content.get("train_list", train_list)
    if saved_list != train_list:
        changes.append(Change("the training list", saved_list, train_list, Affects.TRAINING))
    return changes


def check_start(path: str, content: dict[str, Any], cfg: CfgNode) -> None:
    """Raise CheckpointError if changed settings alter what the weights mean.

    TRAIN.ACCEPT_CHANGES turns the error into a warning.
    """
    _refuse_unless_accepted(path, config_changes(content, cfg, Affects.WEIGHTS), cfg)


def _refuse_unless_accepted(path: str, changes: list[Change], cfg: CfgNode) -> None:
    if changes and not cfg.TRAIN.ACCEPT_CHANGES:
        raise CheckpointError(
            f"{path} was trained with different settings: {describe(changes)}; use the old values, "
            "another checkpoint or OUTPUT_DIR, or set TRAIN.ACCEPT_CHANGES True"
        )
    if changes:
        logger.warning("Accepting changed settings for %s: %s", path, describe(changes))
