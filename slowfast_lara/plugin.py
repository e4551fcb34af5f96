"""Plugin that registers the model in a git checkout or fork of PySlowFast.

`import slowfast_lara.plugin` adds the model's keys to the checkout's default config and the model
to its registry. The checkout's own run_net.py, loaders, mixup and multi-view test then work with
MODEL.MODEL_NAME VisionTransformer. docs/pyslowfast.md explains the setup and lists the parts of
PySlowFast that the plugin relies on.
"""

from __future__ import annotations

import copy
import importlib
import logging
from types import ModuleType
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.config.checkouts import check_checkout, is_motionformer, is_pyslowfast_1
from slowfast_lara.config.keys import all_keys, set_value
from slowfast_lara.config.validate import validate_model
from slowfast_lara.errors import ConfigError
from slowfast_lara.labels import LabelKind, label_kind
from slowfast_lara.models import motionformer
from slowfast_lara.models.weights.pretrained import image_weights, load_pretrained

logger = logging.getLogger(__name__)


def VisionTransformer(cfg: CfgNode) -> nn.Module:
    """Build the model of a checkout's config; PySlowFast registers this function under its name."""
    check(cfg)
    _warn(cfg)
    model = motionformer.VisionTransformer.from_config(cfg)
    train = cfg.TRAIN
    if train.ENABLE and cfg.VIT.IM_PRETRAINED and not train.get("CHECKPOINT_FILE_PATH"):
        if cfg.VIT.PRETRAINED_WEIGHTS != all_keys()["VIT.PRETRAINED_WEIGHTS"].default:
            report = load_pretrained(model, image_weights(cfg), inflate=cfg.VIT.INFLATE)
            logger.info("%s", report.table())
        else:  # only a warning: PySlowFast may load a checkpoint next, or only count FLOPs
            logger.warning("VIT.PRETRAINED_WEIGHTS is not set: the model has random weights")
    return model


def check(cfg: CfgNode) -> None:
    """Raise ConfigError if a checkout's config has a value that this model does not support."""
    # Of several pathways, the model would use only the first one, which has fewer frames.
    arch = cfg.MODEL.get("ARCH")
    if arch in cfg.MODEL.get("MULTI_PATHWAY_ARCH", ()):
        allowed = ", ".join(cfg.MODEL.SINGLE_PATHWAY_ARCH)
        raise ConfigError(f"MODEL.ARCH is {arch!r}; must be a model with one pathway: {allowed}")
    check_checkout(cfg)
    if label_kind(cfg) != LabelKind({"": cfg.MODEL.NUM_CLASSES}):
        raise ConfigError(
            "TRAIN.DATASET Epickitchens and DATA.MULTI_LABEL True are not supported in a checkout "
            "of PySlowFast; use `slowfast-lara run`"
        )
    validate_model(cfg)


def _warn(cfg: CfgNode) -> None:
    """Log warnings about PySlowFast options that give wrong results for this model."""
    if cfg.get("LOG_MODEL_INFO"):
        logger.warning(
            "LOG_MODEL_INFO does not count fused attention: do not compare attentions by its FLOPs"
        )
    decay, depth = cfg.SOLVER.get("LAYER_DECAY", 1.0), cfg.get("MVIT", {}).get("DEPTH")
    if decay != 1 and depth != cfg.VIT.DEPTH:
        logger.warning(
            "SOLVER.LAYER_DECAY counts layers by MVIT.DEPTH (%s): set MVIT.DEPTH to VIT.DEPTH (%d)",
            depth,
            cfg.VIT.DEPTH,
        )


def add_keys(tree: CfgNode) -> None:
    """Add the model's keys to a default config; raise ConfigError if an existing key conflicts."""
    missing = {}
    for key, ours in all_keys().items():
        if not key.startswith("VIT.") and key != "MODEL.ACT_CHECKPOINT":
            continue
        theirs: Any = tree
        for part in key.split("."):
            theirs = theirs.get(part, ...) if isinstance(theirs, CfgNode) else theirs
        if theirs is ...:
            missing[key] = ours.default
        elif type(theirs) is not type(ours.default) or ours.allowed.problem(theirs):
            raise ConfigError(
                f"{key} has the default {theirs!r} in this checkout of PySlowFast and "
                f"{ours.default!r} in slowfast_lara: the key's meanings differ; "
                "rename the checkout's key"
            )
    for key, default in missing.items():
        set_value(tree, key, copy.deepcopy(default))


def add_model(registry: Any) -> None:
    """Register the model, if not yet registered; raise ImportError if its name is taken."""
    name = VisionTransformer.__name__
    if name not in registry:
        registry.register(VisionTransformer)
    elif registry.get(name).__module__ != __name__:
        raise ImportError(
            f"this checkout of PySlowFast has its own model {name}, in "
            f"{registry.get(name).__module__}: rename that model or do not register it"
        )


def _import_from_checkout(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "slowfast":
            raise
        raise ImportError(
            "PySlowFast not found: slowfast_lara.plugin needs a git checkout of it on PYTHONPATH"
        ) from None


def _unsupported(tree: CfgNode) -> str | None:
    """Why a checkout is not supported, and a fix; None if it is supported."""
    if is_pyslowfast_1(tree):
        return (
            "it is from pyslowfast 1.0, not from a git checkout: put the checkout first on "
            "PYTHONPATH, or `pip uninstall pyslowfast` (without a checkout, `slowfast-lara run` "
            "needs no plugin)"
        )
    if is_motionformer(tree):
        return (
            "it is from Motionformer, which has this model itself: without the plugin, "
            "`slowfast-lara run` trains its configs and slowfast_lara.load reads its checkpoints"
        )
    if "MIXED_PRECISION" not in tree.TRAIN:
        return (
            "it is from an early checkout of PySlowFast, without TRAIN.MIXED_PRECISION, which the "
            "plugin requires: update the checkout"
        )
    return None


def _register() -> None:
    defaults = _import_from_checkout("slowfast.config.defaults")
    if problem := _unsupported(defaults._C):
        raise ImportError(f"cannot add the model to {defaults.__file__}: {problem}")
    registry = _import_from_checkout("slowfast.models.build").MODEL_REGISTRY
    add_keys(defaults._C)
    add_model(registry)


_register()
