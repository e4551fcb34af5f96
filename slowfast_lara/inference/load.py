"""A trained model from what a run or somebody else has left: `slowfast_lara.load`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode

from slowfast_lara.config.load import config_of, with_overrides
from slowfast_lara.config.shipped import find_config
from slowfast_lara.config.yaml_files import read_with_bases, to_yaml
from slowfast_lara.data.classes import class_names, numbered
from slowfast_lara.errors import CheckpointError, ConfigError, DataError, InputError
from slowfast_lara.inference.export_folder import DESCRIPTION, SAFETENSORS, read_description
from slowfast_lara.inference.model import TrainedModel, new_network
from slowfast_lara.models.weights.files import bare_names, read_weights
from slowfast_lara.runs import checkpoint, saved_config
from slowfast_lara.runs.folder import CONFIG


class Saved(NamedTuple):
    """Weights and what comes with them (a checkpoint's content), and the config's mapping."""

    path: str
    content: dict[str, Any]
    config: dict[str, Any]
    config_path: str


def load(
    source: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    attention: str | None = None,
    classes: str | None = None,
    overrides: Sequence[Any] = (),
    **options: Any,
) -> TrainedModel:
    """A trained model: model("v.mp4"), model.features("v.mp4"), model.stream("v.mp4").

    Args:
        source: a run's folder (its best checkpoint, if one was kept, or else the newest), a
            checkpoint of ours, an exported folder, or, with `weights`, a config (a file or a
            shipped name).
        weights: a file of weights, for a config.
        device: the first GPU if there is one, or else the CPU, unless given.
        attention: another one than it was trained with, without training.
        classes: a file of class names, instead of those in the checkpoint.
        overrides: config keys and values, KEY, VALUE, KEY, VALUE, ...
        options: num_landmarks, and the options of the attention (beta=2.0, biased=True, ...).

    Where a checkpoint has a moving average of the weights, that is taken, unless `overrides` say
    TEST.USE_EMA False; the log and `model.averaged` tell. `model.from_seed` names what another
    attention has drawn for itself. The model is not compiled unless `overrides` say MODEL.COMPILE
    True. What cannot be used is an error of slowfast_lara.errors, of one line.
    """
    saved = _find(os.fspath(source), None if weights is None else os.fspath(weights))
    cfg = _for_one_process(config_of(saved.config, saved.config_path, overrides), overrides)
    trained = saved_config.check_model(saved.path, saved.content, cfg, swap_attention=True)
    use_ema = cfg.TEST.USE_EMA
    states, averaged = checkpoint.weights_to_use(saved.content, saved.path, averaged=use_ema)
    states = bare_names(states, saved.path)
    _check_sizes(cfg, states, saved.path, trained)
    network = new_network(cfg)
    from_seed = checkpoint.load_weights(network, states, saved.path, trained)
    names = _class_names(saved, cfg, classes)
    model = TrainedModel(network, cfg, names, saved.path, averaged, from_seed)
    if attention is not None or options:
        model = model.with_attention(attention, **options)
    return model if device is None else model.to(device)


def _find(source: str, weights: str | None) -> Saved:
    if weights is not None:
        return Saved(weights, _content(weights), read_with_bases(find_config(source)), source)
    if os.path.isdir(source):
        description = read_description(source)
        return _in_run(source) if description is None else _in_export(source, description)
    if not os.path.exists(source):
        raise InputError(
            f"{source}: no such run or checkpoint (a config alone has no weights: give these too)"
        )
    if source.endswith((".yaml", ".yml")):
        raise InputError(f"{source}: a config alone has no weights; give these too")
    content = _content(source)
    # Of RUN/checkpoints/NAME.pyth the run's own.
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(source))), CONFIG)
    return _with_config(source, content, beside)


def _in_run(folder: str) -> Saved:
    found = checkpoint.best_or_newest(folder)
    if found is None:
        expected = os.path.join(folder, "checkpoints", "*.pyth")
        raise InputError(f"{folder}: no run with a readable checkpoint; {expected} is expected")
    return _with_config(*found, os.path.join(folder, CONFIG))


def _in_export(folder: str, description: dict[str, Any]) -> Saved:
    path, tree = os.path.join(folder, SAFETENSORS), description["config"]
    names = description.get("class_names")
    content = {"model_state": read_weights(path), "class_names": names, "cfg": to_yaml(tree)}
    return Saved(path, content, tree, os.path.join(folder, DESCRIPTION))


def _content(path: str) -> dict[str, Any]:
    """What a checkpoint says, with the weights of any file of weights."""
    weights = read_weights(path)
    return {**checkpoint.peek_checkpoint(path), "model_state": weights}


def _with_config(path: str, content: dict[str, Any], beside: str) -> Saved:
    """The config in a checkpoint; those of version 0.1 have theirs in the run's folder alone."""
    tree = saved_config.saved_config(content)
    if tree is not None:
        return Saved(path, content, tree, path)
    if os.path.isfile(beside):
        return Saved(path, content, read_with_bases(beside), beside)
    raise CheckpointError(f"{path} does not say the config of its model: give that too")


def _check_sizes(
    cfg: CfgNode, states: dict[str, torch.Tensor], path: str, trained: checkpoint.TrainedAttention
) -> None:
    """Compare config and weights before memory is asked for: a foreign file may name any size."""
    blocks = {name.split(".")[1] for name in states if name.startswith("blocks.")}
    if cfg.VIT.DEPTH > len(blocks):
        raise CheckpointError(
            f"{path} has the weights of {len(blocks)} blocks; VIT.DEPTH is {cfg.VIT.DEPTH}"
        )
    try:
        with torch.device("meta"):
            own = new_network(with_overrides(cfg, ["NUM_GPUS", 0, "DEVICE", "auto"])).state_dict()
    except ConfigError as error:  # sizes beyond any memory
        raise CheckpointError(f"{path}: {error}") from None
    if trained != checkpoint.TrainedAttention.SAME:  # another attention has its own
        own, states = _without_estimators(own), _without_estimators(states)
    checkpoint.check_fit(own, states, path)


def _without_estimators(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in states.items() if checkpoint.ESTIMATOR_PART not in name}


def _for_one_process(cfg: CfgNode, overrides: Sequence[Any]) -> CfgNode:
    """On one GPU if there is any; as many views at a time as each process of a test has.

    A model trained by Triton's kernels is used where there are none, too, and a compiled one
    where there is no compiler.
    """
    if "DEVICE" not in overrides[::2] and not torch.backends.mps.is_available():
        cfg = with_overrides(cfg, ["DEVICE", "auto"])
    gpus = min(1, torch.cuda.device_count()) if cfg.DEVICE == "auto" else 0
    for key, value in (("VIT.KERNELS", "auto"), ("MODEL.COMPILE", False)):
        if key not in overrides[::2]:
            cfg = with_overrides(cfg, [key, value])
    if "NUM_GPUS" not in overrides[::2]:
        share = max(1, cfg.TEST.BATCH_SIZE // max(1, cfg.NUM_GPUS))
        cfg = with_overrides(cfg, ["NUM_GPUS", gpus, "TEST.BATCH_SIZE", share])
    if cfg.NUM_GPUS > gpus:
        raise ConfigError(f"NUM_GPUS is {cfg.NUM_GPUS}; at most {gpus} is used here")
    if cfg.DEVICE == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("DEVICE is 'mps'; PyTorch finds no Apple GPU here")
    return with_overrides(cfg, ["SHARD_ID", 0, "NUM_SHARDS", 1])


def _class_names(saved: Saved, cfg: CfgNode, classes: str | None) -> list[str]:
    names, count = saved.content.get("class_names"), cfg.MODEL.NUM_CLASSES
    if classes is None and names is None:
        # The training went on without names that do not fit, and so does the model.
        with contextlib.suppress(DataError):
            return class_names(None, count, cfg.DATA.PATH_TO_DATA_DIR)
        return numbered(count)
    if classes is not None:
        return class_names(classes, count, cfg.DATA.PATH_TO_DATA_DIR)
    if type(names) is not list or len(names) != count or {*map(type, names)} != {str}:
        raise CheckpointError(f"{saved.path}: as its class_names, {count} names are expected")
    return names
