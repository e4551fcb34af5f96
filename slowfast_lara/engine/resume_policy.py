"""Rules for resuming: which settings may differ from those of the checkpoint.

A checkpoint holds its config and a fingerprint of its training list. Both are compared with those
of the run before the run writes any file. TRAIN.ACCEPT_CHANGES True accepts differences.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.checkouts import is_git_checkout_config
from slowfast_lara.config.keys import Affects
from slowfast_lara.errors import CheckpointError
from slowfast_lara.labels import Label
from slowfast_lara.runs.saved_config import Change, config_changes, describe, raw_saved_config

logger = logging.getLogger(__name__)


def list_fingerprint(paths: Sequence[str], labels: Sequence[Label]) -> str:
    """A fingerprint of a list of videos that does not depend on their common parent folder."""
    common = os.path.commonprefix([os.path.dirname(path) + os.sep for path in paths])
    start = common.rfind(os.sep) + 1
    lines = "\n".join(f"{path[start:]}\t{label}" for path, label in zip(paths, labels))
    return f"{len(paths)} videos, sha256 {hashlib.sha256(lines.encode()).hexdigest()[:16]}"


def check_resume(path: str, content: dict[str, Any], cfg: CfgNode, train_list: str) -> None:
    """Raise CheckpointError if changed settings affect the training, unless they are accepted.

    If the run resumes within an epoch and a new list or seed is accepted, the epoch continues at
    the same batch number, in the new order of the videos. If the epoch restarted, its old
    checkpoints would appear to be further ahead than the new ones.
    """
    if is_git_checkout_config(raw_saved_config(content)):
        raise CheckpointError(
            f"{path} was trained in a git checkout of PySlowFast and cannot be resumed; to start "
            "from its weights, pass it as TRAIN.CHECKPOINT_FILE_PATH with "
            "TRAIN.CHECKPOINT_EPOCH_RESET True and another OUTPUT_DIR"
        )
    changes = config_changes(content, cfg, Affects.TRAINING)
    saved_list = content.get("train_list", train_list)
    if saved_list != train_list:
        changes.append(Change("the training list", saved_list, train_list, Affects.TRAINING))
    _refuse_unless_accepted(path, changes, cfg)


def check_start(path: str, content: dict[str, Any], cfg: CfgNode) -> None:
    """Raise CheckpointError if changed settings alter the use of the weights, unless accepted."""
    _refuse_unless_accepted(path, config_changes(content, cfg, Affects.WEIGHTS), cfg)


def _refuse_unless_accepted(path: str, changes: list[Change], cfg: CfgNode) -> None:
    if changes and not cfg.TRAIN.ACCEPT_CHANGES:
        raise CheckpointError(
            f"{path} was trained with different settings: {describe(changes)}; use the old values, "
            "choose another OUTPUT_DIR, or set TRAIN.ACCEPT_CHANGES True"
        )
    if changes:
        logger.warning("Accepting changed settings for %s: %s", path, describe(changes))
