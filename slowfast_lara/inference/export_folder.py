"""config.json of an exported model: the format of its input, its class names and its config."""

from __future__ import annotations

import os
from typing import Any

from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.config import get_cfg
from slowfast_lara.config.keys import get_value
from slowfast_lara.config.load import with_overrides
from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.errors import WeightsError
from slowfast_lara.files import parse_json
from slowfast_lara.labels import label_kind

DESCRIPTION = "config.json"
SAFETENSORS = "model.safetensors"
FORMAT = "slowfast_lara export"
FORMAT_VERSION = 1
# Keys whose values are paths.
_PATHS = (
    "DATA.PATH_PREFIX",
    "DATA.PATH_TO_DATA_DIR",
    "EPICKITCHENS.ANNOTATIONS_DIR",
    "EPICKITCHENS.TEST_LIST",
    "EPICKITCHENS.TRAIN_LIST",
    "EPICKITCHENS.VAL_LIST",
    "EPICKITCHENS.VISUAL_DATA_DIR",
    "OUTPUT_DIR",
    "TENSORBOARD.LOG_DIR",
    "TEST.CHECKPOINT_FILE_PATH",
    "TEST.SAVE_RESULTS_PATH",
    "TRAIN.CHECKPOINT_FILE_PATH",
    "VIT.PRETRAINED_WEIGHTS",
)
# Size limit of config.json: ten times the size of a file with 20,000 class names.
_MAX_CHARACTERS = 10_000_000


def description_of(cfg: CfgNode, class_names: list[str], export_format: str) -> dict[str, Any]:
    """The content of config.json: the format of the input, the class names and the config."""
    data = cfg.DATA
    size = data.TEST_CROP_SIZE
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "form": export_format,
        "slowfast_lara": slowfast_lara.__version__,
        "input": {
            "shape": ["batch", cfg.VIT.CHANNELS, data.NUM_FRAMES, size, size],
            "short_side": data.TEST_SHORT_SIDE or size,
            "resize": data.TEST_RESIZE,
            "channels": "BGR" if data.REVERSE_INPUT_CHANNEL else "RGB",
            "mean": list(data.MEAN),
            "std": list(data.STD),
            "dataset": cfg.TEST.DATASET,
            "sampling_rate": data.SAMPLING_RATE,
            "fps": data.TARGET_FPS,
        },
        "class_names": class_names,
        "class_counts": list(label_kind(cfg).parts.values()),
        "config": parse_yaml(cfg.dump(), "the config"),
    }


def without_paths(cfg: CfgNode) -> CfgNode:
    """Copy of the config with path keys reset to defaults and IMPORTS reduced to file names."""
    defaults = get_cfg()
    opts: list[Any] = ["IMPORTS", [os.path.basename(name) for name in cfg.IMPORTS]]
    for key in _PATHS:
        opts += [key, get_value(defaults, key)]
    return with_overrides(cfg, opts)


def read_description(folder: str) -> dict[str, Any] | None:
    """Read the config.json of an export to safetensors; None if the folder has no config.json."""
    path = os.path.join(folder, DESCRIPTION)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = parse_json(file.read(_MAX_CHARACTERS))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise WeightsError(f"{path} was not written by slowfast_lara export")
    version, form = content.get("format_version"), content.get("form")
    if version != FORMAT_VERSION:
        raise WeightsError(f"{path}: format_version is {version!r:.40}; must be {FORMAT_VERSION}")
    if form != "safetensors":
        raise WeightsError(
            f"{folder} is an export to {form!r:.40}; expected a run, a checkpoint or an export "
            "to safetensors"
        )
    if not isinstance(content.get("config"), dict):
        raise WeightsError(f"{path} has no config")
    return content
