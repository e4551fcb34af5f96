"""What an exported folder says of its model besides the weights: config.json, and reading it."""

from __future__ import annotations

import os
from typing import Any

from fvcore.common.config import CfgNode

import slowfast_lara
from slowfast_lara.config.yaml_files import parse_yaml
from slowfast_lara.errors import WeightsError
from slowfast_lara.files import parse_json

DESCRIPTION = "config.json"
SAFETENSORS = "model.safetensors"
FORMAT = "slowfast_lara export"
FORMAT_VERSION = 1
# The names of 20,000 classes have a tenth of this.
_MOST_CHARACTERS = 10_000_000


def description_of(cfg: CfgNode, class_names: list[str], form: str) -> dict[str, Any]:
    """All that a program needs to feed the model and to read its scores."""
    data = cfg.DATA
    size = data.TEST_CROP_SIZE
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "form": form,
        "slowfast_lara": slowfast_lara.__version__,
        "input": {
            "shape": ["batch", cfg.VIT.CHANNELS, data.NUM_FRAMES, size, size],
            "channels": "BGR" if data.REVERSE_INPUT_CHANNEL else "RGB",
            "mean": list(data.MEAN),
            "std": list(data.STD),
            "dataset": cfg.TEST.DATASET,
            "sampling_rate": data.SAMPLING_RATE,
            "fps": data.TARGET_FPS,
        },
        "class_names": class_names,
        "config": parse_yaml(cfg.dump(), "the config"),
    }


def read_description(folder: str) -> dict[str, Any] | None:
    """The description of an export with weights that `load` can take; None if it is no export."""
    path = os.path.join(folder, DESCRIPTION)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = parse_json(file.read(_MOST_CHARACTERS))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise WeightsError(f"{path}: not of an export of slowfast_lara")
    version, form = content.get("format_version"), content.get("form")
    if version != FORMAT_VERSION:
        raise WeightsError(
            f"{path}: an export of format {version!r:.40}; this version of slowfast_lara reads "
            f"format {FORMAT_VERSION}"
        )
    if form != "safetensors":
        raise WeightsError(
            f"{folder}: an export to {form!r:.40}, a program by itself; `load` takes a run, a "
            "checkpoint or an export to safetensors"
        )
    if not isinstance(content.get("config"), dict):
        raise WeightsError(f"{path}: it has no config")
    return content
