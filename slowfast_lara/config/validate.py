"""Every message about a config key.

`validate` checks what a config says by itself, so that any YAML can be read on
any machine; `check_machine` checks, when a run starts, what it asks of this one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
from fvcore.common.config import CfgNode

from slowfast_lara.attention import ESTIMATORS, build_estimator, estimator_options, has_kernels
from slowfast_lara.attention.kernels.choice import obstacle
from slowfast_lara.config.keys import all_keys
from slowfast_lara.data.rand_augment import NOTATION, NOTATION_HELP
from slowfast_lara.data.registry import dataset_class
from slowfast_lara.errors import ConfigError


def validate(cfg: CfgNode) -> None:
    """Raise ConfigError for the first key whose value cannot work."""
    for check in (
        _check_names,
        _check_numbers,
        _check_model_sizes,
        _check_estimator,
        _check_data,
        _check_solver,
        _check_mixup,
        _check_processes,
    ):
        check(cfg)


def validate_model(cfg: CfgNode) -> None:
    """The checks of the model alone; the rest of the tree may be another program's."""
    for key, known in all_keys().items():
        if key.startswith("VIT.") and known.choices:
            _one_of(cfg, key, known.choices)
    _check_numbers(cfg, "VIT.")
    _check_model_sizes(cfg)
    _check_estimator(cfg)


def check_machine(cfg: CfgNode) -> None:
    """Raise ConfigError for what this machine does not have or allow."""
    # Not in `validate`: two of Motionformer's files have 12 clips for 8 GPUs.
    for key in ("TRAIN.BATCH_SIZE", "TEST.BATCH_SIZE"):
        if cfg.NUM_GPUS > 1 and _get(cfg, key) % cfg.NUM_GPUS:
            _fail(cfg, key, f"a multiple of NUM_GPUS ({cfg.NUM_GPUS}) is expected")
    gpus = torch.cuda.device_count()
    if cfg.NUM_GPUS > gpus:
        _fail(cfg, "NUM_GPUS", f"this machine has {gpus}; 0 runs on the CPU")
    if cfg.DEVICE == "mps" and not torch.backends.mps.is_available():
        _fail(cfg, "DEVICE", "PyTorch finds no Apple GPU here; auto does without")
    if cfg.VIT.KERNELS == "triton":
        others = "mps" if cfg.DEVICE == "mps" else "cpu"
        problem = obstacle(torch.device("cuda", 0) if cfg.NUM_GPUS else torch.device(others))
        if problem:
            _fail(cfg, "VIT.KERNELS", f"{problem}; auto and torch do without")
    if (cfg.TRAIN.ENABLE or cfg.TEST.ENABLE) and not os.path.isdir(cfg.DATA.PATH_TO_DATA_DIR):
        _fail(cfg, "DATA.PATH_TO_DATA_DIR", "an existing folder with the lists is expected")
    without = {
        "TRAIN.CHECKPOINT_FILE_PATH": (
            "; to do without, set it to '' and start from the image weights of "
            "VIT.PRETRAINED_WEIGHTS, or from random ones with VIT.IM_PRETRAINED False too"
        ),
        "TEST.CHECKPOINT_FILE_PATH": "; '' tests the newest checkpoint in OUTPUT_DIR",
    }
    for key, instead in without.items():
        if _get(cfg, key) and not os.path.isfile(_get(cfg, key)):
            _fail(cfg, key, f"an existing file is expected{instead}")
    if cfg.TRAIN.ENABLE and cfg.TENSORBOARD.ENABLE and find_spec("tensorboard") is None:
        _fail(cfg, "TENSORBOARD.ENABLE", "the package tensorboard is needed for it")
    _check_writable(cfg)


def _check_writable(cfg: CfgNode) -> None:
    """OUTPUT_DIR can be written or made; seen without writing, because the run may be refused."""
    folder = os.path.abspath(cfg.OUTPUT_DIR)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        reason = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{folder} may not be written"
    else:
        return
    _fail(cfg, "OUTPUT_DIR", f"a folder that can be written is expected ({reason})")


def _get(cfg: CfgNode, key: str) -> Any:
    value = cfg
    for part in key.split("."):
        value = value[part]
    return value


def _fail(cfg: CfgNode, key: str, allowed: str) -> NoReturn:
    raise ConfigError(f"{key} is {_get(cfg, key)!r}; {allowed}")


def _one_of(cfg: CfgNode, key: str, allowed: Iterable[Any]) -> None:
    allowed = list(allowed)
    if _get(cfg, key) not in allowed:
        _fail(cfg, key, "allowed: " + ", ".join(map(str, allowed)))


def _check_names(cfg: CfgNode) -> None:
    for key, known in all_keys().items():
        if known.choices:
            _one_of(cfg, key, known.choices)
    _one_of(cfg, "MODEL.ARCH", cfg.MODEL.SINGLE_PATHWAY_ARCH)
    for part in ("TRAIN", "TEST"):
        dataset_class(cfg, part)  # a ConfigError if there is none of that name


def _check_numbers(cfg: CfgNode, node: str = "") -> None:
    """Numbers out of their range, of all keys or of those below one node."""
    at_least = {
        1: """TRAIN.BATCH_SIZE TRAIN.EVAL_PERIOD TRAIN.CHECKPOINT_PERIOD TEST.BATCH_SIZE
              TEST.NUM_ENSEMBLE_VIEWS MODEL.NUM_CLASSES VIT.PATCH_SIZE VIT.PATCH_SIZE_TEMP
              VIT.CHANNELS VIT.EMBED_DIM VIT.DEPTH VIT.NUM_HEADS VIT.TEMPORAL_RESOLUTION
              VIT.APPROX_ATTN_DIM DATA.NUM_FRAMES DATA.SAMPLING_RATE DATA.TRAIN_CROP_SIZE
              DATA.TEST_CROP_SIZE DATA.TARGET_FPS SOLVER.MAX_EPOCH SOLVER.ACCUMULATE_STEPS
              NUM_SHARDS LOG_PERIOD DIST_TIMEOUT""",
        0: """TRAIN.CHECKPOINT_ITERATIONS TRAIN.CHECKPOINT_KEEP NUM_GPUS SHARD_ID RNG_SEED
              DATA_LOADER.NUM_WORKERS SOLVER.WEIGHT_DECAY SOLVER.WARMUP_EPOCHS
              SOLVER.WARMUP_START_LR SOLVER.COSINE_END_LR SOLVER.REFERENCE_BATCH
              MIXUP.ALPHA MIXUP.CUTMIX_ALPHA""",
    }
    for key in all_keys():
        value = _get(cfg, key) if key.startswith(node) else None
        if isinstance(value, float) and not math.isfinite(value):
            _fail(cfg, key, "a finite number is expected")
    for least, keys in at_least.items():
        for key in keys.split():
            if key.startswith(node) and not _get(cfg, key) >= least:
                _fail(cfg, key, f"at least {least} is expected")
    for key in ("SOLVER.BASE_LR", "VIT.MLP_RATIO"):
        if key.startswith(node) and not _get(cfg, key) > 0:
            _fail(cfg, key, "a positive number is expected")
    shares = """VIT.DROP VIT.DROP_PATH VIT.HEAD_DROPOUT VIT.POS_DROPOUT VIT.ATTN_DROPOUT
                SOLVER.SMOOTHING SOLVER.EMA_DECAY DATA.MAX_BAD_SHARE"""
    for key in shares.split():
        if key.startswith(node) and not 0 <= _get(cfg, key) < 1:
            _fail(cfg, key, "a number from 0 to below 1 is expected")
    if node:
        return
    for key in ("DATA.RE_PROB", "MIXUP.PROB", "MIXUP.SWITCH_PROB"):
        if not 0 <= _get(cfg, key) <= 1:
            _fail(cfg, key, "a number from 0 to 1 is expected")
    if not 0 < cfg.SOLVER.LAYER_DECAY <= 1:
        _fail(cfg, "SOLVER.LAYER_DECAY", "a number above 0, at most 1, is expected")
    if cfg.SOLVER.CLIP_GRAD is not None and not cfg.SOLVER.CLIP_GRAD > 0:
        _fail(cfg, "SOLVER.CLIP_GRAD", "a positive number or None is expected")


def _check_model_sizes(cfg: CfgNode) -> None:
    vit = cfg.VIT
    if vit.EMBED_DIM % vit.NUM_HEADS:
        _fail(cfg, "VIT.EMBED_DIM", f"a multiple of VIT.NUM_HEADS ({vit.NUM_HEADS}) is expected")
    for key in ("DATA.TRAIN_CROP_SIZE", "DATA.TEST_CROP_SIZE"):
        if _get(cfg, key) % vit.PATCH_SIZE:
            _fail(cfg, key, f"a multiple of VIT.PATCH_SIZE ({vit.PATCH_SIZE}) is expected")
    if not vit.VIDEO_INPUT:
        if vit.PATCH_SIZE_TEMP != 1 or vit.ATTN_LAYER != "joint":
            _fail(
                cfg, "VIT.VIDEO_INPUT", "images need VIT.PATCH_SIZE_TEMP 1 and VIT.ATTN_LAYER joint"
            )
    elif cfg.DATA.NUM_FRAMES != vit.TEMPORAL_RESOLUTION * vit.PATCH_SIZE_TEMP:
        _fail(
            cfg,
            "DATA.NUM_FRAMES",
            f"VIT.TEMPORAL_RESOLUTION * VIT.PATCH_SIZE_TEMP "
            f"({vit.TEMPORAL_RESOLUTION} * {vit.PATCH_SIZE_TEMP}) is expected",
        )


def _check_estimator(cfg: CfgNode) -> None:
    vit, name = cfg.VIT, cfg.VIT.APPROX_ATTN_TYPE
    for estimator in ESTIMATORS:
        for option_name, option in estimator_options(estimator).items():
            key = f"VIT.{estimator}.{option_name}".upper()
            problem = option.problem(_get(cfg, key))
            if problem:
                _fail(cfg, key, problem)
    has_kernel = vit.ATTN_LAYER == "trajectory" or (name != "none" and has_kernels(name))
    if vit.KERNELS == "triton" and not has_kernel:
        _fail(
            cfg,
            "VIT.KERNELS",
            f"neither {vit.ATTN_LAYER} attention nor its estimator ({name}) has a kernel",
        )
    if name == "none":
        return
    if vit.KERNELS == "triton" and has_kernels(name):
        _check_kernel_sizes(cfg, name)
    if vit.ATTN_DROPOUT > 0 and not ESTIMATORS[name].exact:
        _fail(cfg, "VIT.ATTN_DROPOUT", f"only exact attention has dropout, {name} allows 0")
    if ESTIMATORS[name].landmarks_are_tokens:
        crop = min(cfg.DATA.TRAIN_CROP_SIZE, cfg.DATA.TEST_CROP_SIZE)
        tokens = (crop // vit.PATCH_SIZE) ** 2
        if vit.VIDEO_INPUT and vit.ATTN_LAYER != "divided":
            tokens *= vit.TEMPORAL_RESOLUTION
        if vit.APPROX_ATTN_DIM > tokens:
            _fail(
                cfg,
                "VIT.APPROX_ATTN_DIM",
                f"{vit.ATTN_LAYER} attention has {tokens} tokens for {name}'s landmarks, "
                f"at most {tokens} are allowed",
            )


def _check_kernel_sizes(cfg: CfgNode, name: str) -> None:
    options = {key: cfg.VIT[name.upper()][key.upper()] for key in estimator_options(name)}
    head_dim = cfg.VIT.EMBED_DIM // cfg.VIT.NUM_HEADS
    with torch.device("meta"):  # nothing is drawn
        sizes = {"head_dim": head_dim, "num_landmarks": cfg.VIT.APPROX_ATTN_DIM}
        missing = build_estimator(name, **sizes, **options).unsupported
    if missing:
        _fail(cfg, "VIT.KERNELS", f"there is no kernel for {missing}; auto does without")


def _check_data(cfg: CfgNode) -> None:
    data = cfg.DATA
    for key in ("DATA.MEAN", "DATA.STD"):
        if len(_get(cfg, key)) != cfg.VIT.CHANNELS or not _all_numbers(_get(cfg, key)):
            _fail(cfg, key, f"{cfg.VIT.CHANNELS} numbers (VIT.CHANNELS) are expected")
    if not all(deviation > 0 for deviation in data.STD):
        _fail(cfg, "DATA.STD", "positive numbers are expected")
    scales = data.TRAIN_JITTER_SCALES
    if len(scales) != 2 or not _all_numbers(scales) or not 0 < scales[0] <= scales[1]:
        _fail(cfg, "DATA.TRAIN_JITTER_SCALES", "[smallest, largest] short side is expected")
    if scales[0] < data.TRAIN_CROP_SIZE and not data.USE_RANDOM_RESIZE_CROPS:
        _fail(
            cfg,
            "DATA.TRAIN_JITTER_SCALES",
            f"a short side of at least DATA.TRAIN_CROP_SIZE ({data.TRAIN_CROP_SIZE}) is expected",
        )
    if not data.PATH_LABEL_SEPARATOR:
        _fail(cfg, "DATA.PATH_LABEL_SEPARATOR", "at least one character is expected")
    if not NOTATION.fullmatch(data.RAND_AUGMENT):
        _fail(cfg, "DATA.RAND_AUGMENT", NOTATION_HELP)


def _all_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _check_solver(cfg: CfgNode) -> None:
    solver = cfg.SOLVER
    if solver.LR_POLICY != "steps_with_relative_lrs":
        return
    steps = solver.STEPS
    if not steps or not _all_numbers(steps) or steps[0] != 0 or sorted(set(steps)) != steps:
        _fail(cfg, "SOLVER.STEPS", "rising epochs that start with 0 are expected")
    if len(solver.LRS) != len(steps) or not _all_numbers(solver.LRS):
        _fail(cfg, "SOLVER.LRS", f"one factor for each of SOLVER.STEPS ({len(steps)}) is expected")


def _check_mixup(cfg: CfgNode) -> None:
    mixup = cfg.MIXUP
    if mixup.ENABLE and not mixup.ALPHA + mixup.CUTMIX_ALPHA > 0:
        _fail(
            cfg,
            "MIXUP.ENABLE",
            f"MIXUP.ALPHA ({mixup.ALPHA}) or MIXUP.CUTMIX_ALPHA ({mixup.CUTMIX_ALPHA}) above 0 is "
            "expected with it",
        )


def _check_processes(cfg: CfgNode) -> None:
    if cfg.SHARD_ID >= cfg.NUM_SHARDS:
        _fail(cfg, "SHARD_ID", f"below NUM_SHARDS ({cfg.NUM_SHARDS}) is expected")
    if cfg.DEVICE == "mps":
        for key, allowed in (("NUM_GPUS", 0), ("NUM_SHARDS", 1)):
            if cfg[key] != allowed:
                _fail(cfg, key, f"with DEVICE mps, {allowed} is expected")
