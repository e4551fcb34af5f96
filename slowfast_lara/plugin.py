"""Our model in a git checkout of PySlowFast, or in a fork of it: `import slowfast_lara.plugin`.

The import adds the keys that the model reads to the checkout's default config, and the model to
its registry. The checkout's own run_net.py, loaders, mixup and multi-view test then work with
MODEL.MODEL_NAME VisionTransformer. docs/pyslowfast.md shows how, and says what of PySlowFast this
relies on.
"""

from __future__ import annotations

import copy
import importlib
import logging
from types import ModuleType
from typing import Any

from fvcore.common.config import CfgNode
from torch import nn

from slowfast_lara.config.checkouts import is_of_a_checkout
from slowfast_lara.config.keys import Key, all_keys
from slowfast_lara.config.validate import validate_model
from slowfast_lara.errors import ConfigError
from slowfast_lara.models import motionformer
from slowfast_lara.models.weights.pretrained import image_weights, load_pretrained

logger = logging.getLogger(__name__)

# What a checkout may set otherwise for its own models.
_EXPECTED = {"MODEL.HEAD_ACT": "softmax", "DETECTION.ENABLE": False}


def VisionTransformer(cfg: CfgNode) -> nn.Module:
    """The config's model: what PySlowFast registers by this name, and calls with its config."""
    check(cfg)
    model = motionformer.VisionTransformer.from_config(cfg)
    train = cfg.TRAIN
    if train.ENABLE and cfg.VIT.IM_PRETRAINED and not train.get("CHECKPOINT_FILE_PATH"):
        if cfg.VIT.PRETRAINED_WEIGHTS != all_keys()["VIT.PRETRAINED_WEIGHTS"].default:
            report = load_pretrained(model, image_weights(cfg), inflate=cfg.VIT.INFLATE)
            logger.info("%s", report.table())
        else:  # no error: PySlowFast may be about to load a checkpoint, or only to count FLOPs
            logger.warning("VIT.PRETRAINED_WEIGHTS is not set: the model has random weights")
    return model


def check(cfg: CfgNode) -> None:
    """Raise ConfigError for a key of a checkout's config that this model cannot work with."""
    # Of several pathways the model would see the first, with a fraction of the frames.
    arch = cfg.MODEL.get("ARCH")
    if arch in cfg.MODEL.get("MULTI_PATHWAY_ARCH", ()):
        allowed = ", ".join(cfg.MODEL.SINGLE_PATHWAY_ARCH)
        raise ConfigError(f"MODEL.ARCH is {arch!r}; one pathway is expected: {allowed}")
    for key, expected in _EXPECTED.items():
        node, name = key.split(".")
        if (value := cfg.get(node, {}).get(name, expected)) != expected:
            raise ConfigError(f"{key} is {value!r}; VisionTransformer allows {expected!r} alone")
    validate_model(cfg)


def add_keys(tree: CfgNode) -> None:
    """Add the model's keys to a default config, all or none. What is there stays as it is."""
    missing = []
    for key, known in all_keys().items():
        if key.startswith("VIT.") or key == "MODEL.ACT_CHECKPOINT":
            *path, name = key.split(".")
            node: Any = tree
            for part in path:
                node = node.get(part, CfgNode()) if isinstance(node, CfgNode) else node
            if not isinstance(node, CfgNode) or (name in node and not _alike(node[name], known)):
                theirs = node[name] if isinstance(node, CfgNode) else node
                raise ConfigError(
                    f"{key} has the default {theirs!r} in this checkout of PySlowFast and "
                    f"{known.default!r} in slowfast_lara: they mean different things"
                )
            if name not in node:
                missing.append((path, name, known.default))
    for path, name, default in missing:
        node = tree
        for part in path:
            node = node.setdefault(part, CfgNode())
        node[name] = copy.deepcopy(default)


def _alike(theirs: Any, ours: Key) -> bool:
    """Whether a default of a checkout can have the meaning of our key."""
    return type(theirs) is type(ours.default) and (not ours.choices or theirs in ours.choices)


def add_model(registry: Any) -> None:
    """Register the model, unless it is there already."""
    name = VisionTransformer.__name__
    if name not in registry:
        registry.register(VisionTransformer)
    elif registry.get(name).__module__ != __name__:
        raise ImportError(
            f"this checkout of PySlowFast has a model {name} of its own, in "
            f"{registry.get(name).__module__}: do not register it, or rename it"
        )


def _part_of_checkout(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "slowfast":
            raise
        raise ImportError(
            "no PySlowFast is found: slowfast_lara.plugin is for a git checkout of it, which is "
            "expected on PYTHONPATH"
        ) from None


def _plug_in() -> None:
    defaults = _part_of_checkout("slowfast.config.defaults")
    if not is_of_a_checkout(defaults._C):
        raise ImportError(
            f"{defaults.__file__} is of pyslowfast 1.0, not of a git checkout of PySlowFast: put "
            "the checkout's folder first on PYTHONPATH, or `pip uninstall pyslowfast` (without a "
            "checkout, `slowfast-lara run` needs no plugin)"
        )
    registry = _part_of_checkout("slowfast.models.build").MODEL_REGISTRY
    add_keys(defaults._C)
    add_model(registry)


_plug_in()
