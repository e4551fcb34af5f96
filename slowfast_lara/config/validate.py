"""Validation of a config: values of single keys, combinations of keys, and the machine's resources.

`validate` does not depend on the machine, so a valid YAML file loads on any machine.
`check_machine` is called when a run starts.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import NoReturn

import torch
from fvcore.common.config import CfgNode

from slowfast_lara.attention import ESTIMATORS, build_estimator, has_kernels
from slowfast_lara.attention.kernels.choice import obstacle
from slowfast_lara.config.keys import all_keys, get_value, one_of
from slowfast_lara.data.charades import Charades
from slowfast_lara.data.classes import DEFAULT_NAME, read_names
from slowfast_lara.data.epickitchens import Epickitchens
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.data.ssv2 import Ssv2
from slowfast_lara.errors import ConfigError, DataError
from slowfast_lara.models.attention_config import estimator_settings
from slowfast_lara.models.space_time import DIVIDED


def validate(cfg: CfgNode) -> None:
    """Raise ConfigError for the first invalid key or combination of keys."""
    _check_keys(cfg)
    if problem := one_of(*cfg.MODEL.SINGLE_PATHWAY_ARCH).problem(cfg.MODEL.ARCH):
        _fail(cfg, "MODEL.ARCH", problem)
    for part in ("TRAIN", "TEST"):
        dataset_class(cfg, part)  # raises ConfigError for an unknown dataset
    _check_model_sizes(cfg)
    _check_attention(cfg)
    _check_data(cfg)
    _check_labels(cfg)
    _check_training(cfg)
    _check_processes(cfg)


def validate_model(cfg: CfgNode) -> None:
    """Check only the model's keys: a PySlowFast checkout has other rules for the remaining keys."""
    _check_keys(cfg, "VIT.")
    _check_model_sizes(cfg)
    _check_attention(cfg)


def check_machine(cfg: CfgNode) -> None:
    """Raise ConfigError if the config does not fit the files, packages or GPUs of this machine."""
    # Not in `validate`, which must accept Motionformer's YAML files: two of them have BATCH_SIZE 12
    # and NUM_GPUS 8.
    for key in ("TRAIN.BATCH_SIZE", "TEST.BATCH_SIZE"):
        if cfg.NUM_GPUS > 1 and get_value(cfg, key) % cfg.NUM_GPUS:
            _fail(cfg, key, f"must be a multiple of NUM_GPUS ({cfg.NUM_GPUS})")
    gpus = torch.cuda.device_count()
    if cfg.NUM_GPUS > gpus:
        _fail(cfg, "NUM_GPUS", f"this machine has {gpus}; set 0 to use the CPU")
    if cfg.DEVICE == "mps" and not torch.backends.mps.is_available():
        _fail(cfg, "DEVICE", "PyTorch finds no Apple GPU; set auto to use the CPU")
    if cfg.VIT.KERNELS == "triton":
        device = "cuda:0" if cfg.NUM_GPUS else "mps" if cfg.DEVICE == "mps" else "cpu"
        if problem := obstacle(torch.device(device)):
            _fail(cfg, "VIT.KERNELS", f"{problem}; set auto or torch")
    if cfg.TRAIN.ENABLE or cfg.TEST.ENABLE:
        check_lists(cfg)
    if cfg.TRAIN.ENABLE and dataset_class(cfg, "TRAIN") is not Epickitchens:
        _check_class_count(cfg)
    without_file = {
        "TRAIN.CHECKPOINT_FILE_PATH": "start from VIT.PRETRAINED_WEIGHTS or, if VIT.IM_PRETRAINED "
        "is False, from random weights",
        "TEST.CHECKPOINT_FILE_PATH": "test the newest checkpoint in OUTPUT_DIR",
    }
    for key, effect in without_file.items():
        if get_value(cfg, key) and not os.path.isfile(get_value(cfg, key)):
            _fail(cfg, key, f"must be an existing file, or '' to {effect}")
    if cfg.TRAIN.ENABLE and cfg.TENSORBOARD.ENABLE and find_spec("tensorboard") is None:
        _fail(cfg, "TENSORBOARD.ENABLE", "the package tensorboard is not installed")
    if cfg.TRAIN.ENABLE and cfg.WANDB.ENABLE:
        spec = find_spec("wandb")
        # If wandb is not installed, find_spec may find W&B's log folder `wandb`, with origin None.
        if spec is None or spec.origin is None:
            problem = "the package wandb is not installed; pip install 'slowfast_lara[wandb]'"
            _fail(cfg, "WANDB.ENABLE", problem)
    _check_writable(cfg)


def check_lists(cfg: CfgNode) -> None:
    """Raise ConfigError if the folder of the video lists or annotations does not exist."""
    of_kitchens = dataset_class(cfg, "TRAIN") is Epickitchens and cfg.EPICKITCHENS.ANNOTATIONS_DIR
    folder = "EPICKITCHENS.ANNOTATIONS_DIR" if of_kitchens else "DATA.PATH_TO_DATA_DIR"
    if not os.path.isdir(get_value(cfg, folder)):
        _fail(cfg, folder, "must be an existing folder with the lists")


def _check_class_count(cfg: CfgNode) -> None:
    """Fail if a valid classes.json has a number of classes other than MODEL.NUM_CLASSES."""
    path = os.path.join(cfg.DATA.PATH_TO_DATA_DIR, DEFAULT_NAME)
    if not os.path.isfile(path):
        return
    try:
        names = read_names(path)
    except DataError:  # not fatal: training logs a warning
        return
    if len(names) != cfg.MODEL.NUM_CLASSES and sorted(names) == list(range(len(names))):
        fix = f"set MODEL.NUM_CLASSES {len(names)}"
        _fail(cfg, "MODEL.NUM_CLASSES", f"{path} has {len(names)} classes; {fix}")


def _check_writable(cfg: CfgNode) -> None:
    """Check that OUTPUT_DIR is writable, but do not create it: a later check may still fail."""
    folder = os.path.abspath(cfg.OUTPUT_DIR)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        _fail(cfg, "OUTPUT_DIR", f"{folder} is not a writable folder")


def _fail(cfg: CfgNode, key: str, problem: str) -> NoReturn:
    raise ConfigError(f"{key} is {get_value(cfg, key)!r}; {problem}")


def _check_keys(cfg: CfgNode, prefix: str = "") -> None:
    for key, known in all_keys().items():
        if key.startswith(prefix):
            value = get_value(cfg, key)
            if isinstance(value, float) and not math.isfinite(value):
                _fail(cfg, key, "must be a finite number")
            if problem := known.allowed.problem(value):
                _fail(cfg, key, problem)


def _check_model_sizes(cfg: CfgNode) -> None:
    vit = cfg.VIT
    if vit.EMBED_DIM % vit.NUM_HEADS:
        _fail(cfg, "VIT.EMBED_DIM", f"must be a multiple of VIT.NUM_HEADS ({vit.NUM_HEADS})")
    for key in ("DATA.TRAIN_CROP_SIZE", "DATA.TEST_CROP_SIZE", "VIT.POS_CROP_SIZE"):
        if get_value(cfg, key) % vit.PATCH_SIZE:
            _fail(cfg, key, f"must be a multiple of VIT.PATCH_SIZE ({vit.PATCH_SIZE})")
    if vit.POS_NUM_FRAMES % vit.PATCH_SIZE_TEMP:
        multiple = f"a multiple of VIT.PATCH_SIZE_TEMP ({vit.PATCH_SIZE_TEMP})"
        _fail(cfg, "VIT.POS_NUM_FRAMES", f"must be {multiple}")
    frames = vit.TEMPORAL_RESOLUTION * vit.PATCH_SIZE_TEMP
    if not vit.VIDEO_INPUT:
        if vit.PATCH_SIZE_TEMP != 1 or vit.ATTN_LAYER != "joint":
            required = "VIT.PATCH_SIZE_TEMP 1 and VIT.ATTN_LAYER joint"
            _fail(cfg, "VIT.VIDEO_INPUT", f"images require {required}")
    elif cfg.DATA.NUM_FRAMES != frames:
        product = "VIT.TEMPORAL_RESOLUTION * VIT.PATCH_SIZE_TEMP"
        _fail(cfg, "DATA.NUM_FRAMES", f"must be {product} ({frames})")


def _check_attention(cfg: CfgNode) -> None:
    vit, name = cfg.VIT, cfg.VIT.APPROX_ATTN_TYPE
    estimator_has_kernel = name != "none" and has_kernels(name)
    if vit.KERNELS == "triton" and not (vit.ATTN_LAYER == "trajectory" or estimator_has_kernel):
        pair = f"{vit.ATTN_LAYER} attention with VIT.APPROX_ATTN_TYPE {name}"
        _fail(cfg, "VIT.KERNELS", f"{pair} has no kernel; set auto or torch")
    if name == "none":
        return
    if vit.KERNELS == "triton" and estimator_has_kernel:
        with torch.device("meta"):  # allocates no memory, draws no random numbers
            head_dim = vit.EMBED_DIM // vit.NUM_HEADS
            estimator = build_estimator(name, head_dim=head_dim, **estimator_settings(cfg, name))
        crop = max(cfg.DATA.TRAIN_CROP_SIZE, cfg.DATA.TEST_CROP_SIZE)
        keys = (crop // vit.PATCH_SIZE) ** 2
        if vit.VIDEO_INPUT and vit.ATTN_LAYER == "joint":
            keys *= vit.TEMPORAL_RESOLUTION
        if problem := estimator.unsupported(keys):
            _fail(cfg, "VIT.KERNELS", f"no kernel for {problem}; set auto")
    if vit.ATTN_DROPOUT > 0 and not ESTIMATORS[name].exact:
        _fail(cfg, "VIT.ATTN_DROPOUT", f"must be 0 with {name}: only exact attention has dropout")
    if ESTIMATORS[name].landmarks_are_tokens:
        crop = min(cfg.DATA.TRAIN_CROP_SIZE, cfg.DATA.TEST_CROP_SIZE)
        tokens = (crop // vit.PATCH_SIZE) ** 2
        if vit.VIDEO_INPUT and vit.ATTN_LAYER not in DIVIDED:
            tokens *= vit.TEMPORAL_RESOLUTION
        if vit.APPROX_ATTN_DIM > tokens:
            limit = f"at most {tokens}, the number of tokens in {vit.ATTN_LAYER} attention"
            _fail(cfg, "VIT.APPROX_ATTN_DIM", f"the number of landmarks of {name} must be {limit}")


def _check_data(cfg: CfgNode) -> None:
    data, crop = cfg.DATA, cfg.DATA.TRAIN_CROP_SIZE
    if 0 < data.TEST_SHORT_SIDE < data.TEST_CROP_SIZE:
        least = f"0 or at least DATA.TEST_CROP_SIZE ({data.TEST_CROP_SIZE})"
        _fail(cfg, "DATA.TEST_SHORT_SIDE", f"must be {least}")
    for key in ("DATA.MEAN", "DATA.STD"):
        if len(get_value(cfg, key)) != cfg.VIT.CHANNELS:
            _fail(cfg, key, f"must have {cfg.VIT.CHANNELS} numbers (VIT.CHANNELS)")
    if data.TRAIN_JITTER_SCALES[0] < crop and not data.USE_RANDOM_RESIZE_CROPS:
        least = f"at least DATA.TRAIN_CROP_SIZE ({crop})"
        _fail(cfg, "DATA.TRAIN_JITTER_SCALES", f"the smallest short side must be {least}")


def _check_labels(cfg: CfgNode) -> None:
    """Check that datasets, loss, label smoothing and head support the same kind of labels."""
    train, test = (dataset_class(cfg, part) for part in ("TRAIN", "TEST"))
    if (train is Epickitchens) != (test is Epickitchens):
        _fail(cfg, "TEST.DATASET", "must be Epickitchens if and only if TRAIN.DATASET is")
    several, is_bce = cfg.DATA.MULTI_LABEL, cfg.MODEL.LOSS_FUNC.startswith("bce")
    if several and train in (Epickitchens, Ssv2):
        _fail(cfg, "DATA.MULTI_LABEL", f"must be False with {train.__name__}")
    if Charades in (train, test) and not several:
        _fail(cfg, "DATA.MULTI_LABEL", "must be True if TRAIN.DATASET or TEST.DATASET is Charades")
    if several != is_bce:
        losses = "bce_logit or bce with" if several else "cross_entropy without"
        _fail(cfg, "MODEL.LOSS_FUNC", f"must be {losses} DATA.MULTI_LABEL")
    if several and cfg.SOLVER.SMOOTHING:
        _fail(cfg, "SOLVER.SMOOTHING", "must be 0 with DATA.MULTI_LABEL")
    if several and "," in cfg.DATA.PATH_LABEL_SEPARATOR:
        _fail(cfg, "DATA.PATH_LABEL_SEPARATOR", "must have no comma: commas separate labels")
    if cfg.MODEL.HEAD_ACT == "sigmoid" and not several:
        _fail(cfg, "MODEL.HEAD_ACT", "must be softmax without DATA.MULTI_LABEL")


def _check_training(cfg: CfgNode) -> None:
    solver, mixup = cfg.SOLVER, cfg.MIXUP
    if solver.LR_POLICY == "steps_with_relative_lrs":
        steps = solver.STEPS
        if not steps or steps[0] != 0 or sorted(set(steps)) != steps:
            _fail(cfg, "SOLVER.STEPS", "must be a rising list of epochs that starts with 0")
        if len(solver.LRS) != len(steps):
            _fail(cfg, "SOLVER.LRS", f"must have {len(steps)} numbers, as many as SOLVER.STEPS")
    elif solver.LR_POLICY == "cosine" and solver.COSINE_END_LR > solver.BASE_LR:
        _fail(cfg, "SOLVER.COSINE_END_LR", f"must be at most SOLVER.BASE_LR ({solver.BASE_LR:g})")
    if mixup.ENABLE and not mixup.ALPHA + mixup.CUTMIX_ALPHA > 0:
        _fail(cfg, "MIXUP.ENABLE", "requires MIXUP.ALPHA or MIXUP.CUTMIX_ALPHA above 0")
    if cfg.TRAIN.MAX_RESTARTS and not cfg.TRAIN.AUTO_RESUME:
        _fail(cfg, "TRAIN.MAX_RESTARTS", "must be 0 if TRAIN.AUTO_RESUME is False")


def _check_processes(cfg: CfgNode) -> None:
    if cfg.DETERMINISTIC and cfg.CUDNN_BENCHMARK:
        _fail(cfg, "CUDNN_BENCHMARK", "must be False with DETERMINISTIC")
    if cfg.SHARD_ID >= cfg.NUM_SHARDS:
        _fail(cfg, "SHARD_ID", f"must be below NUM_SHARDS ({cfg.NUM_SHARDS})")
    if cfg.DEVICE == "mps":
        for key, required in (("NUM_GPUS", 0), ("NUM_SHARDS", 1)):
            if cfg[key] != required:
                _fail(cfg, key, f"must be {required} with DEVICE mps")
