"""Loading of trained models: `slowfast_lara.load`."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode

from slowfast_lara.config import checkouts
from slowfast_lara.config.load import Overrides, config_of, override_pairs, with_overrides
from slowfast_lara.config.shipped import find_config
from slowfast_lara.config.yaml_files import read_with_bases, to_yaml
from slowfast_lara.data.classes import class_names, numbered
from slowfast_lara.data.epickitchens import annotations_folder
from slowfast_lara.errors import CheckpointError, ConfigError, DataError, InputError
from slowfast_lara.inference import hub
from slowfast_lara.inference.export_folder import DESCRIPTION, SAFETENSORS, read_description
from slowfast_lara.inference.hugging_face import is_hub_folder, read_hub_folder, resize_clips
from slowfast_lara.inference.model import TrainedModel, new_network
from slowfast_lara.inference.scoring import views_at_a_time
from slowfast_lara.labels import label_kind
from slowfast_lara.models.weights.files import bare_names, read_weights
from slowfast_lara.runs import checkpoint, saved_config
from slowfast_lara.runs.folder import CONFIG

logger = logging.getLogger(__name__)


class ModelSource(NamedTuple):
    """Path and content of a checkpoint, and the model's config with the path it was read from."""

    path: str
    content: dict[str, Any]
    config: dict[str, Any]
    config_path: str


def load(
    source: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    revision: str | None = None,
    attention: str | None = None,
    classes: str | None = None,
    overrides: Overrides = (),
    **options: Any,
) -> TrainedModel:
    """Load a trained model for inference.

    If the checkpoint holds EMA weights, they are used unless TEST.USE_EMA is False in `overrides`
    or in the model's config. The model is compiled only if `overrides` set MODEL.COMPILE True.

    Args:
        source: the folder of a run (loads its best checkpoint if there is one, else the newest),
            a checkpoint, the folder of an export to safetensors, or a folder of Hugging Face
            transformers (ViViT, VideoMAE, TimeSformer); or hf://USER/MODEL, a folder of one of the
            last two kinds on the Hugging Face Hub. If `weights` is given: a config file, or the
            name of a shipped config.
        weights: a checkpoint or weights file for the config in `source`.
        device: where to put the model; default: the first NVIDIA GPU, or the CPU if there is none;
            the Apple GPU if DEVICE is mps.
        revision: branch, tag or commit of a model on the Hub; default: its main branch.
        attention: name of an attention that replaces the trained one, without training:
            "exact", an estimator, or "lara-recommended" (LARA with the recommended options).
        classes: a file of class names, to use instead of the names in the checkpoint.
        overrides: config overrides: a mapping {KEY: VALUE}, or KEY, VALUE, KEY, VALUE, ... For a
            folder of transformers, overrides of DATA.NUM_FRAMES and DATA.TEST_CROP_SIZE also
            resize the position embeddings.
        options: `num_landmarks` and the options of the attention, e.g. `beta=2.0`.

    Returns:
        The model on its device, in eval mode.

    Raises:
        slowfast_lara.errors.UserError: the model cannot be loaded; the message is one line.
    """
    source = os.fspath(source)
    if source.startswith(hub.SCHEME):
        source = hub.download(source, revision)
    elif revision is not None:
        raise InputError(f"revision is {revision!r:.80}; only {hub.SCHEME} models have a revision")
    found = _find(source, None if weights is None else os.fspath(weights), overrides)
    cfg = _single_process(config_of(found.config, found.config_path, overrides), overrides)
    trained = saved_config.check_model(found.path, found.content, cfg, swap_attention=True)
    states, averaged = checkpoint.weights_to_use(
        found.content, found.path, averaged=cfg.TEST.USE_EMA
    )
    states = bare_names(states, found.path)
    _check_sizes(cfg, states, found.path, trained)
    network = new_network(cfg)
    from_seed = checkpoint.load_weights(network, states, found.path, trained)
    names = _class_names(found, cfg, classes)
    model = TrainedModel(network, cfg, names, found.path, averaged, from_seed)
    if attention is not None or options:
        model = model.with_attention(attention, **options)
    return model if device is None else model.to(device)


def _find(source: str, weights: str | None, overrides: Overrides) -> ModelSource:
    if weights is not None:
        tree = read_with_bases(find_config(source))
        return ModelSource(weights, _read_checkpoint(weights), tree, source)
    if os.path.isdir(source):
        if is_hub_folder(source):
            return _from_hub(source, overrides)
        description = read_description(source)
        if description is not None:
            return _from_export(source, description)
        found = checkpoint.best_or_newest(source)
        if found is None:
            pattern = os.path.join(source, "checkpoints", "*.pyth")
            raise InputError(f"{source}: no readable checkpoint; expected {pattern}")
        return _with_config(*found, os.path.join(source, CONFIG))
    if not os.path.exists(source):
        raise InputError(f"{source}: no such run or checkpoint (a config also needs weights)")
    if source.endswith((".yaml", ".yml")):
        raise InputError(f"{source} is a config; its weights must also be given")
    run_folder = os.path.dirname(os.path.dirname(os.path.abspath(source)))
    return _with_config(source, _read_checkpoint(source), os.path.join(run_folder, CONFIG))


def _from_export(folder: str, description: dict[str, Any]) -> ModelSource:
    path, tree = os.path.join(folder, SAFETENSORS), description["config"]
    names = description.get("class_names")
    content = {"model_state": read_weights(path), "class_names": names, "cfg": to_yaml(tree)}
    return ModelSource(path, content, tree, os.path.join(folder, DESCRIPTION))


def _from_hub(folder: str, overrides: Overrides) -> ModelSource:
    path, tree, weights, names = read_hub_folder(folder)
    resize_clips(tree, dict(override_pairs(overrides)))
    content = {"model_state": weights, "class_names": names, "cfg": to_yaml(tree)}
    return ModelSource(path, content, tree, folder)


def _read_checkpoint(path: str) -> dict[str, Any]:
    weights = read_weights(path)
    return {**checkpoint.peek_checkpoint(path), "model_state": weights}


def _with_config(path: str, content: dict[str, Any], run_config: str) -> ModelSource:
    """Use the config in the checkpoint or, if it has none (version 0.1), the config of the run."""
    tree = saved_config.saved_config(content)
    if tree is not None:
        _check_origin(path, content)
        return ModelSource(path, content, tree, path)
    if os.path.isfile(run_config):
        return ModelSource(path, content, read_with_bases(run_config), run_config)
    raise CheckpointError(f"{path} holds no model config; give the config and the weights")


def _check_origin(path: str, content: dict[str, Any]) -> None:
    """Check a checkpoint of a PySlowFast git checkout or of Motionformer.

    Raises CheckpointError for unsupported settings. Warns of settings with which its scores here
    differ from those of the program that trained it.
    """
    tree = saved_config.checkout_config(content)
    if tree is None:
        return
    try:
        checkouts.check_checkout(tree)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if differences := checkouts.differences(tree):
        message = "Scores of %s differ from those of the program that trained it: %s"
        logger.warning(message, path, "; ".join(differences))


def _check_sizes(
    cfg: CfgNode, states: dict[str, torch.Tensor], path: str, trained: checkpoint.TrainedAttention
) -> None:
    """Compare config and weights before allocating memory: the config may have huge sizes."""
    blocks = {name.split(".")[1] for name in states if name.startswith("blocks.")}
    if cfg.VIT.DEPTH > len(blocks):
        raise CheckpointError(f"{path} has {len(blocks)} blocks; VIT.DEPTH is {cfg.VIT.DEPTH}")
    try:
        with torch.device("meta"):
            own = new_network(with_overrides(cfg, ["NUM_GPUS", 0, "DEVICE", "auto"])).state_dict()
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if trained != checkpoint.TrainedAttention.SAME:
        own, states = (
            {name: x for name, x in tensors.items() if checkpoint.ESTIMATOR_PART not in name}
            for tensors in (own, states)
        )
    checkpoint.check_fit(own, states, path)


def _single_process(cfg: CfgNode, overrides: Overrides) -> CfgNode:
    """Adapt the config of a run to one process on at most one GPU of this machine.

    The batch size becomes that of one process of a multi-GPU test, so that the scores are the
    same as in the test. VIT.KERNELS and MODEL.COMPILE are reset unless `overrides` set them,
    because this machine may lack Triton or a compiler.
    """
    given = [key for key, _ in override_pairs(overrides)]
    opts: list[Any] = ["SHARD_ID", 0, "NUM_SHARDS", 1]
    for key, value in (("VIT.KERNELS", "auto"), ("MODEL.COMPILE", False)):
        opts += [] if key in given else [key, value]
    if "DEVICE" not in given and not torch.backends.mps.is_available():
        opts += ["DEVICE", "auto"]
    cfg = with_overrides(cfg, opts)
    gpus = min(1, torch.cuda.device_count()) if cfg.DEVICE == "auto" else 0
    if "NUM_GPUS" not in given:
        cfg = with_overrides(cfg, ["NUM_GPUS", gpus, "TEST.BATCH_SIZE", views_at_a_time(cfg)])
    if cfg.NUM_GPUS > gpus:
        raise ConfigError(f"NUM_GPUS is {cfg.NUM_GPUS}; must be at most {gpus} for inference")
    if cfg.DEVICE == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("DEVICE is 'mps'; PyTorch finds no Apple GPU")
    return cfg


def _class_names(source: ModelSource, cfg: CfgNode, classes: str | None) -> list[str]:
    names, count = source.content.get("class_names"), label_kind(cfg).num_classes
    if classes is not None:
        return class_names(classes, count, "")
    if names is None:
        with contextlib.suppress(DataError):  # ignore invalid class names, as training does
            return class_names(None, count, annotations_folder(cfg))
        return numbered(count)
    if type(names) is not list or len(names) != count or {*map(type, names)} != {str}:
        raise CheckpointError(f"{source.path}: class_names must be a list of {count} names")
    return names
