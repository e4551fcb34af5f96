"""Folders of Hugging Face transformers: ViViT, VideoMAE and TimeSformer for classification.

A folder has config.json, preprocessor_config.json, and the weights: model.safetensors, or shards
with an index, or pytorch_model.bin in older folders. This module converts these files to a config
and weights of this package, without the transformers library.
Nothing in these files is trusted: values of wrong types or sizes raise a one-line WeightsError.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slowfast_lara.errors import WeightsError
from slowfast_lara.files import parse_json
from slowfast_lara.models.weights.conversion import to_own_names
from slowfast_lara.models.weights.files import read_weights

logger = logging.getLogger(__name__)

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
OLD_WEIGHTS = "pytorch_model.bin"
_SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)
_MAX_CHARACTERS = 10_000_000
_MAX_SIZE = 2**20  # upper limit of sizes in config.json, and of the tokens per clip
_GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_fast": "tanh",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
# Defaults of the image processors in transformers, by model type.
_PROCESSORS: dict[str, dict[str, Any]] = {
    "vivit": {"size": 256, "rescale_factor": 1 / 127.5, "offset": True, "mean": 0.5, "std": 0.5},
    "videomae": {"size": 224, "mean": 0.5, "std": 0.5},
    "timesformer": {"size": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
}
_BILINEAR = 2  # value of PIL.Image.Resampling.BILINEAR


class HubFile:
    """A JSON object in a file, with checked access to its values."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, encoding="utf-8") as file:
                self.content = parse_json(file.read(_MAX_CHARACTERS))
        except (OSError, ValueError) as error:
            raise WeightsError(f"cannot read {path}: {error}") from None
        if not isinstance(self.content, dict):
            raise WeightsError(f"{path}: expected a JSON object")

    def fail(self, key: str, expected: str) -> WeightsError:
        value = self.content.get(key)
        return WeightsError(f"{self.path}: {key} is {value!r:.80}; must be {expected}")

    def size(self, key: str, default: int | None = None) -> int:
        """An integer from 1 to _MAX_SIZE."""
        value = self.content.get(key, default)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise self.fail(key, f"an integer from 1 to {_MAX_SIZE}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.content.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.content.get(key, default)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def must_be(self, key: str, expected: Any) -> None:
        if self.content.get(key, expected) not in (None, expected):
            raise self.fail(key, f"{expected!r}")

    def channels(self, key: str, default: Any) -> list[float]:
        """Three numbers, one per channel; a single number is used for all channels."""
        value = self.content.get(key)
        value = default if value is None else value
        values = value if isinstance(value, list) else [value] * 3
        if len(values) != 3 or any(type(x) not in (int, float) for x in values):
            raise self.fail(key, "three numbers")
        return [float(x) for x in values]


def is_hub_folder(folder: str) -> bool:
    """Whether a folder has a config.json with a `model_type`, as in transformers."""
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        return False
    try:
        return "model_type" in HubFile(path).content
    except WeightsError:
        return False


def read_hub_folder(folder: str) -> tuple[str, dict[str, Any], dict[str, Tensor], list[str]]:
    """Read a model: the path of its weights, its config, its weights and its class names."""
    tree = config_tree(folder)
    path, weights = _read_weights(folder)
    try:
        weights = to_own_names(weights)
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from None
    names = _class_names(HubFile(os.path.join(folder, CONFIG)))
    return path, tree, _with_unused(weights, tree["VIT"]), names


def config_tree(folder: str) -> dict[str, Any]:
    """The config of the model in a folder, with this package's keys."""
    file = HubFile(os.path.join(folder, CONFIG))
    kind = file.content.get("model_type")
    if not isinstance(kind, str) or kind not in _VIT_KEYS:
        raise file.fail("model_type", f"one of {', '.join(_VIT_KEYS)}")
    architectures = file.content.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(x, str) and x.endswith("ForVideoClassification") for x in architectures
    ):
        raise file.fail("architectures", "a list of names that end in ForVideoClassification")
    tree = _model_tree(file, kind, len(_class_names(file)))
    tree["DATA"] |= _preprocessing(folder, kind, tree["VIT"]["POS_CROP_SIZE"])
    tree["DATA"]["TRAIN_CROP_SIZE"] = crop = tree["DATA"]["TEST_CROP_SIZE"]
    tree["DATA"]["TRAIN_JITTER_SCALES"] = [round(crop * 8 / 7), round(crop * 10 / 7)]
    return tree


def resize_clips(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Adapt a config to overrides of DATA.NUM_FRAMES and DATA.TEST_CROP_SIZE.

    The model resizes its position embeddings. The short side of the frame scales with the crop.
    """
    vit, data = tree["VIT"], tree["DATA"]
    # Ignore values that are not integers: the validation of the overrides rejects them later.
    frames, crop = (
        int(text) if (text := str(overrides.get(key))[:10]).isdecimal() else 0
        for key in ("DATA.NUM_FRAMES", "DATA.TEST_CROP_SIZE")
    )
    if frames:
        data["NUM_FRAMES"] = frames
        vit["TEMPORAL_RESOLUTION"] = max(1, frames // vit["PATCH_SIZE_TEMP"])
    if crop:
        data["TEST_SHORT_SIDE"] = round(data["TEST_SHORT_SIDE"] * crop / data["TEST_CROP_SIZE"])
        data["TEST_CROP_SIZE"] = crop


def _class_names(file: HubFile) -> list[str]:
    labels = file.content.get("id2label")
    if labels is None:
        return [f"LABEL_{number}" for number in range(file.size("num_labels", 2))]
    valid = isinstance(labels, dict) and all(isinstance(x, str) for x in labels.values())
    if not valid or set(labels) != {str(number) for number in range(len(labels))} or not labels:
        raise file.fail("id2label", "an object with a class name for each index from 0")
    return [labels[str(number)] for number in range(len(labels))]


def _model_tree(file: HubFile, kind: str, num_classes: int) -> dict[str, Any]:
    """The config of the model and of a test, without preprocessing."""
    activation = file.content.get("hidden_act", "gelu_fast" if kind == "vivit" else "gelu")
    if not isinstance(activation, str) or activation not in _GELUS:
        raise file.fail("hidden_act", f"one of {', '.join(_GELUS)}")
    width, hidden = file.size("hidden_size", 768), file.size("intermediate_size", 3072)
    ratio = hidden / width
    frames, size = file.size("num_frames", _FRAMES[kind]), _side(file)
    vit = {
        "EMBED_DIM": width,
        "DEPTH": file.size("num_hidden_layers", 12),
        "NUM_HEADS": file.size("num_attention_heads", 12),
        # The model computes int(width * ratio), which must equal `hidden` despite rounding errors.
        "MLP_RATIO": ratio if int(width * ratio) == hidden else (hidden + 0.5) / width,
        "CHANNELS": file.size("num_channels", 3),
        "GELU": _GELUS[activation],
        "NORM_EPS": file.number("layer_norm_eps", 1e-12 if kind == "videomae" else 1e-6),
        "USE_MLP": False,
        "IM_PRETRAINED": False,
        "POS_CROP_SIZE": size,
        "POS_NUM_FRAMES": frames,
        **_VIT_KEYS[kind](file),
    }
    vit.setdefault("FINAL_NORM_EPS", vit["NORM_EPS"])
    if size % vit["PATCH_SIZE"]:
        raise file.fail("image_size", f"a multiple of the size of a patch ({vit['PATCH_SIZE']})")
    if frames % vit["PATCH_SIZE_TEMP"]:
        raise file.fail("num_frames", f"a multiple of the tubelet size ({vit['PATCH_SIZE_TEMP']})")
    vit["TEMPORAL_RESOLUTION"] = frames // vit["PATCH_SIZE_TEMP"]
    if vit["TEMPORAL_RESOLUTION"] * (size // vit["PATCH_SIZE"]) ** 2 > _MAX_SIZE:
        raise file.fail("image_size", f"so small that a clip has at most {_MAX_SIZE} tokens")
    # Sampling rate and number of test clips of the released models. TimeSformer was released for
    # 8x32, 16x16 and 96x4 (frames x sampling rate).
    apart, clips = {"videomae": (4, 5), "vivit": (2, 4)}.get(kind, (max(4, 256 // frames), 1))
    return {
        "VIT": vit,
        "MODEL": {"MODEL_NAME": "VisionTransformer", "ARCH": "slow", "NUM_CLASSES": num_classes},
        "DATA": {"NUM_FRAMES": frames, "SAMPLING_RATE": apart},
        "TEST": {"NUM_ENSEMBLE_VIEWS": clips, "NUM_SPATIAL_CROPS": 3},
    }


def _side(file: HubFile) -> int:
    """The side length of a crop: an integer, or a list of two equal integers."""
    value = file.content.get("image_size", 224)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if type(value) is not int or not 1 <= value <= _MAX_SIZE:
        raise file.fail("image_size", f"an integer from 1 to {_MAX_SIZE}, or two equal ones")
    return value


def _vivit(file: HubFile) -> dict[str, Any]:
    size = file.content.get("tubelet_size", [2, 16, 16])
    if (
        not isinstance(size, list)
        or len(size) != 3
        or any(type(x) is not int or not 1 <= x <= _MAX_SIZE for x in size)
        or size[1] != size[2]
    ):
        raise file.fail("tubelet_size", "three positive integers, of which the last two are equal")
    return {
        "ATTN_LAYER": "joint",
        "POS_EMBED": "joint",
        "PATCH_SIZE": size[1],
        "PATCH_SIZE_TEMP": size[0],
        "QKV_BIAS": file.flag("qkv_bias", True),
    }


def _videomae(file: HubFile) -> dict[str, Any]:
    file.must_be("use_mean_pooling", True)
    return {
        "ATTN_LAYER": "joint",
        "POS_EMBED": "sincos",
        "CLS_TOKEN": False,
        "PATCH_SIZE": file.size("patch_size", 16),
        "PATCH_SIZE_TEMP": file.size("tubelet_size", 2),
        # Older config.json files name this flag qkv_bias.
        "QKV_BIAS": file.flag("qkv_bias", file.flag("qv_bias", True)),
        "FINAL_NORM_EPS": 1e-5,  # epsilon of `fc_norm`; not in config.json
    }


def _timesformer(file: HubFile) -> dict[str, Any]:
    file.must_be("attention_type", "divided_space_time")
    return {
        "ATTN_LAYER": "timesformer",
        "POS_EMBED": "separate",
        "PATCH_SIZE": file.size("patch_size", 16),
        "PATCH_SIZE_TEMP": 1,
        "QKV_BIAS": file.flag("qkv_bias", True),
    }


_VIT_KEYS: dict[str, Callable[[HubFile], dict[str, Any]]] = {
    "vivit": _vivit,
    "videomae": _videomae,
    "timesformer": _timesformer,
}
# Defaults of `num_frames` in transformers, by model type.
_FRAMES = {"vivit": 32, "videomae": 16, "timesformer": 8}


def _preprocessing(folder: str, kind: str, image_size: int) -> dict[str, Any]:
    """The DATA keys for the processor's resizing, cropping and normalisation."""
    path, defaults = os.path.join(folder, PREPROCESSOR), _PROCESSORS[kind]
    if not os.path.isfile(path):
        message = "%s is missing: using the defaults of transformers for %s, and crops of %d pixels"
        logger.warning(message, path, kind, image_size)
        file = HubFile(os.path.join(folder, CONFIG))
        file.content = {"size": max(defaults["size"], image_size), "crop_size": image_size}
    else:
        file = HubFile(path)
    for key, expected in (("do_resize", True), ("do_center_crop", True), ("resample", _BILINEAR)):
        file.must_be(key, expected)
    short, crop = _edge(file, "size", defaults["size"]), _edge(file, "crop_size", 224)
    if short < crop:
        raise file.fail("size", f"at least crop_size ({crop})")
    factor, offset = 1.0, 0.0
    if file.flag("do_rescale", True):
        factor = file.number("rescale_factor", defaults.get("rescale_factor", 1 / 255))
        offset = float(file.flag("offset", defaults.get("offset", False)))
    mean, std = [0.0] * 3, [1.0] * 3
    if file.flag("do_normalize", True):
        mean = file.channels("image_mean", defaults["mean"])
        std = file.channels("image_std", defaults["std"])
    if min(std) <= 0:
        raise file.fail("image_std", "positive")
    # (x * factor - offset - mean) / std, written as (x / 255 - MEAN) / STD
    return {
        "TEST_CROP_SIZE": crop,
        "TEST_SHORT_SIDE": short,
        "TEST_RESIZE": "pillow",
        "MEAN": [(offset + x) / (255 * factor) for x in mean],
        "STD": [x / (255 * factor) for x in std],
    }


def _edge(file: HubFile, key: str, default: int) -> int:
    """The shorter edge (`size`) or the side of a square (`crop_size`), in pixels."""
    value = file.content.get(key)
    value = default if value is None else value
    if isinstance(value, dict):
        if key == "size":
            value = None if value.get("longest_edge") else value.get("shortest_edge")
        else:
            value = value.get("height") if value.get("height") == value.get("width") else None
    if type(value) is not int or not 1 <= value <= _MAX_SIZE:
        expected = "a shortest_edge without longest_edge," if key == "size" else "a square"
        raise file.fail(key, f"{expected} of 1 to {_MAX_SIZE} pixels")
    return value


def _read_weights(folder: str) -> tuple[str, dict[str, Tensor]]:
    path, index_path, old_path = (os.path.join(folder, x) for x in (WEIGHTS, INDEX, OLD_WEIGHTS))
    if os.path.isfile(path) or not os.path.isfile(index_path):
        path = path if os.path.isfile(path) or not os.path.isfile(old_path) else old_path
        return path, read_weights(path)
    index = HubFile(index_path)
    files = index.content.get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(x, str) and _SHARD.fullmatch(x) for x in files.values()
    ):
        raise index.fail("weight_map", "an object whose values are names of safetensors files")
    weights: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        weights |= read_weights(os.path.join(folder, name))
    return index_path, weights


def _with_unused(weights: dict[str, Tensor], vit: dict[str, Any]) -> dict[str, Tensor]:
    """Add zeros for parameters that the model has, but does not use with these settings."""
    names = ("patch_embed_3d.proj", "patch_embed.proj")
    used, unused = names if vit["PATCH_SIZE_TEMP"] > 1 else names[::-1]
    kernel = weights.get(f"{used}.weight", torch.empty(0))
    if kernel.ndim not in (4, 5):
        return weights  # loading the weights will report this wrong shape
    width, channels, *_, rows, columns = kernel.shape
    depth = (1,) if used == "patch_embed.proj" else ()
    shapes = {
        f"{unused}.weight": (width, channels, *depth, rows, columns),
        f"{unused}.bias": (width,),
    }
    if vit["POS_EMBED"] == "joint":
        side = vit["POS_CROP_SIZE"] // vit["PATCH_SIZE"]
        shapes["pos_embed"] = (1, side**2 + 1, width)
    # Use `expand`, which allocates no memory: sizes in config.json may be huge.
    return {**{key: torch.zeros(1).expand(shape) for key, shape in shapes.items()}, **weights}
