"""Which settings may change when a run resumes from a checkpoint.

A checkpoint has the config that it was trained with, and a sum of the training list. They
are compared with what is asked before anything is written.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from slowfast_lara.config.checkouts import is_of_a_checkout
from slowfast_lara.errors import CheckpointError
from slowfast_lara.runs.saved_config import Bears, Change, changes_of, listed, saved_tree

logger = logging.getLogger(__name__)

METHOD = "SOLVER.OPTIMIZING_METHOD"


def list_sum(paths: Sequence[str], labels: Sequence[int]) -> str:
    """What identifies a list of videos, wherever the folder is that has them all."""
    common = os.path.commonprefix([os.path.dirname(path) + os.sep for path in paths])
    start = common.rfind(os.sep) + 1
    lines = "\n".join(f"{path[start:]}\t{label}" for path, label in zip(paths, labels))
    return f"{len(paths)} videos, sha256 {hashlib.sha256(lines.encode()).hexdigest()[:16]}"


def check_continued(path: str, content: dict[str, Any], cfg: CfgNode, train_list: str) -> None:
    """Refuse to go on from a checkpoint with what would change its numbers, unless accepted.

    With another list or seed that is accepted, an epoch that was begun goes on from its place in
    the new order: to begin it again would leave checkpoints that seem to be further.
    """
    if is_of_a_checkout(saved_tree(content)):
        raise CheckpointError(
            f"{path} was trained in a git checkout of PySlowFast, which trains otherwise; give it "
            "by TRAIN.CHECKPOINT_FILE_PATH with TRAIN.CHECKPOINT_EPOCH_RESET True and another "
            "OUTPUT_DIR, to start from its weights"
        )
    changes = changes_of(content, cfg, Bears.TRAINING)
    saved_list = content.get("train_list", train_list)
    if saved_list != train_list:
        changes.append(Change("the training list", saved_list, train_list, Bears.TRAINING))
    _refuse_unless_accepted(path, changes, cfg)


def check_start(path: str, content: dict[str, Any], cfg: CfgNode) -> None:
    """Refuse to start a training from weights that mean something else in this model."""
    _refuse_unless_accepted(path, changes_of(content, cfg, Bears.WEIGHTS), cfg)


def _refuse_unless_accepted(path: str, changes: list[Change], cfg: CfgNode) -> None:
    if changes and not cfg.TRAIN.ACCEPT_CHANGES:
        raise CheckpointError(
            f"{path} was trained otherwise: {listed(changes)}; take its values, another "
            "OUTPUT_DIR, or TRAIN.ACCEPT_CHANGES True to go on with the new ones"
        )
    if changes:
        logger.warning("%s goes on otherwise (TRAIN.ACCEPT_CHANGES): %s", path, listed(changes))
