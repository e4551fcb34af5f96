"""The config saved in a checkpoint, and how it differs from the one asked for."""

from __future__ import annotations

import logging
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
from slowfast_lara.errors import CheckpointError, ConfigError
from slowfast_lara.runs.checkpoint import TrainedAttention

logger = logging.getLogger(__name__)

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


def check_model(
    path: str, content: dict[str, Any], cfg: CfgNode, *, swap_attention: bool = False
) -> TrainedAttention:
    """Refuse weights of a model that computes something else, but for its attention if asked."""
    changes = changes_of(content, cfg, Bears.ATTENTION)
    swapped = [change for change in changes if change.bears == Bears.ATTENTION]
    if swap_attention:
        changes = [change for change in changes if change not in swapped]
    if changes:
        raise CheckpointError(f"{path} was trained as another model: {listed(changes)}")
    if swapped:
        logger.info("Another attention with the weights of %s: %s", path, listed(swapped))
        return TrainedAttention.OTHER
    unknown = swap_attention and saved_config(content) is None
    return TrainedAttention.UNKNOWN if unknown else TrainedAttention.SAME


def saved_value(content: dict[str, Any], key: str) -> Any:
    """What a checkpoint was trained with; None if it does not say."""
    tree = saved_config(content)
    return None if tree is None else _value(tree, key)


def listed(changes: Sequence[Change]) -> str:
    return "; ".join(map(str, changes))


def changes_of(content: dict[str, Any], cfg: CfgNode, least: Bears) -> list[Change]:
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
    tree = saved_tree(content)
    if not isinstance(tree.get("VIT"), dict):
        return None
    return shared_part(tree) if is_of_a_checkout(tree) else tree


def saved_tree(content: dict[str, Any]) -> dict[str, Any]:
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
