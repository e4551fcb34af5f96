"""A folder holds one experiment: what may change between its runs.

A checkpoint has the config that it was trained with, and a sum of the training list. They
are compared with what is asked before anything is written. `BEARS_ON` decides for every
key, once, what a change of it would bear on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import reprlib
from collections.abc import Sequence
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fvcore.common.config import CfgNode

from slowfast_lara.config import get_cfg
from slowfast_lara.config.checkouts import is_of_a_checkout, shared_part
from slowfast_lara.config.keys import all_keys
from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.engine.checkpoint import TrainedAttention
from slowfast_lara.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

METHOD = "SOLVER.OPTIMIZING_METHOD"
# Values of a checkpoint may be anything, nested without end too.
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80


class Bears(IntEnum):
    """What a change of a key bears on; one that bears on more bears on all that is before it."""

    NOTHING = 0  # no number of the experiment
    TRAINING = 1  # what is learnt from here on
    ATTENTION = 2  # what the model computes, in a part that is exchanged on purpose
    MODEL = 3  # what the model computes from a video
    WEIGHTS = 4  # what the weights mean, in any model: their shapes do not tell


# The first pattern that fits a key decides. What none fits bears on the training.
BEARS_ON: tuple[tuple[Bears, str, str], ...] = (
    (
        Bears.NOTHING,
        "how the first step was come to, which is past",
        "VIT.IM_PRETRAINED VIT.PRETRAINED_WEIGHTS VIT.INFLATE TRAIN.CHECKPOINT_FILE_PATH "
        "TRAIN.CHECKPOINT_EPOCH_RESET TRAIN.CHECKPOINT_INFLATE TRAIN.AUTO_RESUME "
        "TRAIN.ACCEPT_CHANGES",
    ),
    (
        Bears.NOTHING,
        "which machines compute, and how they share the work; a batch is that of one machine",
        "DEVICE NUM_GPUS NUM_SHARDS SHARD_ID DIST_* DATA_LOADER.* TRAIN.BATCH_SIZE CUDNN_BENCHMARK",
    ),
    (
        Bears.NOTHING,
        "memory for time, and what computes: the same function, up to rounding",
        "MODEL.ACT_CHECKPOINT MODEL.COMPILE VIT.KERNELS",
    ),
    (
        Bears.NOTHING,
        "what is done, saved and told, and when; when to give up",
        "TRAIN.ENABLE TRAIN.EVAL_PERIOD TRAIN.CHECKPOINT_* OUTPUT_DIR LOG_PERIOD TENSORBOARD.* "
        "DATA.MAX_BAD_SHARE",
    ),
    (
        Bears.NOTHING,
        "where the videos are: the training list is compared by its content",
        "DATA.PATH_*",
    ),
    (Bears.NOTHING, "tests alone, which come with their own record", "TEST.* DATA.TEST_CROP_SIZE"),
    (Bears.NOTHING, "names that nothing reads", "MODEL.ARCH MODEL.SINGLE_PATHWAY_ARCH"),
    (
        Bears.TRAINING,
        "noise that a trained model does not have",
        "VIT.DROP VIT.DROP_PATH VIT.*_DROPOUT",
    ),
    (
        Bears.WEIGHTS,
        "how one and the same matrices are read",
        "VIT.NUM_HEADS VIT.USE_ORIGINAL_TRAJ_ATTN_CODE",
    ),
    (
        Bears.ATTENTION,
        "the estimator, which may replace another in a trained model",
        "VIT.APPROX_ATTN_* VIT.*.*",
    ),
    (
        Bears.MODEL,
        "the network, and the clips that it has learnt to see",
        "VIT.* MODEL.* DATA.NUM_FRAMES DATA.SAMPLING_RATE DATA.TARGET_FPS DATA.MEAN DATA.STD "
        "DATA.REVERSE_INPUT_CHANNEL",
    ),
)


def bears_on(key: str) -> Bears:
    for bears, _reason, patterns in BEARS_ON:
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return bears
    return Bears.TRAINING


class Change(NamedTuple):
    """A key, or the training list, with another value than a checkpoint was trained with."""

    key: str
    saved: Any
    asked: Any
    bears: Bears

    def __str__(self) -> str:
        return f"{self.key} is {_SHORT.repr(self.saved)} in it and {_SHORT.repr(self.asked)} here"


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
    if is_of_a_checkout(_saved_tree(content)):
        raise CheckpointError(
            f"{path} was trained in a git checkout of PySlowFast, which trains otherwise; give it "
            "by TRAIN.CHECKPOINT_FILE_PATH with TRAIN.CHECKPOINT_EPOCH_RESET True and another "
            "OUTPUT_DIR, to start from its weights"
        )
    changes = _changes(content, cfg, Bears.TRAINING)
    saved_list = content.get("train_list", train_list)
    if saved_list != train_list:
        changes.append(Change("the training list", saved_list, train_list, Bears.TRAINING))
    _refuse_unless_accepted(path, changes, cfg)


def check_start(path: str, content: dict[str, Any], cfg: CfgNode) -> None:
    """Refuse to start a training from weights that mean something else in this model."""
    _refuse_unless_accepted(path, _changes(content, cfg, Bears.WEIGHTS), cfg)


def check_model(
    path: str, content: dict[str, Any], cfg: CfgNode, *, swap_attention: bool = False
) -> TrainedAttention:
    """Refuse weights of a model that computes something else, but for its attention if asked."""
    changes = _changes(content, cfg, Bears.ATTENTION)
    swapped = [change for change in changes if change.bears == Bears.ATTENTION]
    if swap_attention:
        changes = [change for change in changes if change not in swapped]
    if changes:
        raise CheckpointError(f"{path} was trained as another model: {_listed(changes)}")
    if swapped:
        logger.info("Another attention with the weights of %s: %s", path, _listed(swapped))
        return TrainedAttention.OTHER
    unknown = swap_attention and saved_config(content) is None
    return TrainedAttention.UNKNOWN if unknown else TrainedAttention.SAME


def saved_value(content: dict[str, Any], key: str) -> Any:
    """What a checkpoint was trained with; None if it does not say."""
    tree = saved_config(content)
    return None if tree is None else _value(tree, key)


def _refuse_unless_accepted(path: str, changes: list[Change], cfg: CfgNode) -> None:
    if changes and not cfg.TRAIN.ACCEPT_CHANGES:
        raise CheckpointError(
            f"{path} was trained otherwise: {_listed(changes)}; take its values, another "
            "OUTPUT_DIR, or TRAIN.ACCEPT_CHANGES True to go on with the new ones"
        )
    if changes:
        logger.warning("%s goes on otherwise (TRAIN.ACCEPT_CHANGES): %s", path, _listed(changes))


def _listed(changes: Sequence[Change]) -> str:
    return "; ".join(map(str, changes))


def _changes(content: dict[str, Any], cfg: CfgNode, least: Bears) -> list[Change]:
    tree = saved_config(content)
    changes = []
    for key in all_keys() if tree is not None else ():
        bears = bears_on(key)
        saved, asked = _value(tree, key), _value(cfg, key)
        if bears >= least and not _same(key, saved, asked):
            changes.append(Change(key, saved, asked, bears))
    return changes


def saved_config(content: dict[str, Any]) -> dict[str, Any] | None:
    """The config in a checkpoint; None if it has none of a model like ours."""
    tree = _saved_tree(content)
    if not isinstance(tree.get("VIT"), dict):
        return None
    return shared_part(tree) if is_of_a_checkout(tree) else tree


def _saved_tree(content: dict[str, Any]) -> dict[str, Any]:
    """All of the config in a checkpoint, as it was written; {} if it cannot be read."""
    text = content.get("cfg")
    try:
        return parse_yaml(text, "the checkpoint's config") if isinstance(text, str) else {}
    except ConfigError:
        return {}


def _value(tree: Any, key: str) -> Any:
    """A value by its dotted name; keys that are newer than the tree had their default."""
    value = tree
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _value(get_cfg(), key)
        value = value[part]
    return value


def _same(key: str, saved: Any, asked: Any) -> bool:
    if key == "TRAIN.DATASET":  # as the registry finds it
        return str(saved).lower() == str(asked).lower()
    return saved == asked
