"""Pretrained models for `python -m studies pretrained`: image models and video models."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode
from torch import Tensor
from torch.nn import functional

from slowfast_lara import hf
from slowfast_lara.analysis.measure import count_macs
from slowfast_lara.analysis.settings import Setting
from slowfast_lara.attention import Estimator, build_estimator
from slowfast_lara.config import get_cfg
from slowfast_lara.errors import InputError
from slowfast_lara.inference.hugging_face import is_hub_folder
from slowfast_lara.inference.layers import LayerInputs, layer_inputs
from slowfast_lara.inference.load import load
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.models.attention_config import EXACT

CROP, FRAMES = 224, 8  # defaults for image models


class ImageModel:
    """An image model of Hugging Face transformers, which processes each frame separately."""

    unit = "frame"

    def __init__(self, network: Any, cfg: CfgNode) -> None:
        self.network, self.cfg = network, cfg
        self.depth = network.config.num_hidden_layers

    def layers(self, view: Tensor) -> list[LayerInputs]:
        """q, k, v of the patches of a view [3,T,H,W] in every layer with exact attention."""
        exact = build_estimator(EXACT, head_dim=1)
        patches = (view.shape[-1] // self.cfg.VIT.PATCH_SIZE) ** 2
        inputs = []
        for layer in captured_qkv(self.network, view.transpose(0, 1)):
            # [F,h,N,d] -> [1,h,F*P,d]: keep the last P of the N tokens, without CLS and registers
            q, k, v = (x[:, :, -patches:].transpose(0, 1).flatten(1, 2)[None] for x in layer)
            inputs.append(LayerInputs(q, k, v, view.shape[1], exact))
        return inputs

    def features(self, views: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Tensor]:
        """Final features of CLS [frames,D] and of the patches [frames,P,D], for one attention."""
        images = torch.cat([view.transpose(0, 1) for view in views])
        hf.use(self.network, setting.name, **_options(setting))
        parts = [self.network(some).last_hidden_state for some in images.split(8)]
        hf.use(self.network, EXACT)
        tokens = torch.cat(parts)
        registers = getattr(self.network.config, "num_register_tokens", 0)
        return tokens[:, 0], tokens[:, 1 + registers :]

    def macs(self, setting: Setting) -> float:
        """MACs of an attention in one layer for one frame."""
        config, side = self.network.config, self.cfg.DATA.TEST_CROP_SIZE // self.cfg.VIT.PATCH_SIZE
        tokens = 1 + side**2 + getattr(config, "num_register_tokens", 0)
        shape = (1, config.num_attention_heads, tokens)
        return attention_macs(setting, shape, config.hidden_size, num_frames=1)


class VideoModel:
    """A trained model of this package with trajectory attention."""

    unit = "clip"

    def __init__(self, model: TrainedModel) -> None:
        self.model, self.cfg, self.depth = model, model.cfg, model.cfg.VIT.DEPTH

    def layers(self, view: Tensor) -> list[LayerInputs]:
        """q, k, v of a view [3,T,H,W] in every layer."""
        return layer_inputs(self.model.network, view, self.cfg, range(self.depth))

    def features(self, views: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Tensor]:
        """Inputs of the classifier [clips,D], and final features of the patches [clips,N,D]."""
        network: Any = self.model.with_attention(setting.name, **_options(setting)).network
        tokens: list[Tensor] = []
        hook = network.blocks[-1].register_forward_hook(lambda *args: tokens.append(args[2]))
        features = torch.cat([network.forward_features([view[None]]) for view in views])
        hook.remove()
        prefix = network.has_cls + network.num_registers
        return features, network.norm(torch.cat(tokens))[:, prefix:]

    def macs(self, setting: Setting) -> float:
        """MACs of an attention in one layer for one clip."""
        vit = self.cfg.VIT
        frames = self.cfg.DATA.NUM_FRAMES // vit.PATCH_SIZE_TEMP
        tokens = frames * (self.cfg.DATA.TEST_CROP_SIZE // vit.PATCH_SIZE) ** 2
        return attention_macs(setting, (1, vit.NUM_HEADS, tokens), vit.EMBED_DIM, frames)


def load_pretrained(path: str, crop: int | None, frames: int | None) -> ImageModel | VideoModel:
    """Load a model. The size of the clips can be chosen for image models only."""
    if is_hub_folder(path):
        return ImageModel(*load_image_model(path, crop or CROP, frames or FRAMES))
    if crop is not None or frames is not None:
        raise InputError(
            "--crop and --frames are for image models; a video model has its own sizes"
        )
    model = load(path, attention=EXACT)
    if model.cfg.VIT.ATTN_LAYER != "trajectory":
        raise InputError(
            f"{path}: VIT.ATTN_LAYER is {model.cfg.VIT.ATTN_LAYER}; must be trajectory"
        )
    return VideoModel(model)


def load_image_model(folder: str, crop: int, frames: int) -> tuple[Any, CfgNode]:
    """A transformers model with exact attention, and a config to read clips for this model."""
    from transformers import AutoModel

    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise InputError(f"{folder}: expected a Hugging Face folder with config.json")
    network = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    patch = getattr(network.config, "patch_size", None)
    if not isinstance(patch, int):
        raise InputError(f"{folder}: expected an image model with square patches")
    if crop % patch:
        raise InputError(f"--crop is {crop}; must be a multiple of the patch size, {patch}")
    cfg = get_cfg()
    cfg.VIT.PATCH_SIZE, cfg.VIT.PATCH_SIZE_TEMP = patch, 1
    cfg.DATA.NUM_FRAMES, cfg.DATA.SAMPLING_RATE = frames, 8
    cfg.DATA.TEST_CROP_SIZE = crop
    cfg.TEST.NUM_ENSEMBLE_VIEWS = cfg.TEST.NUM_SPATIAL_CROPS = 1
    processor = Path(folder) / "preprocessor_config.json"
    if processor.is_file():
        values = json.loads(processor.read_text(encoding="utf-8"))
        cfg.DATA.MEAN, cfg.DATA.STD = values["image_mean"], values["image_std"]
    return network.eval(), cfg


@torch.no_grad()
def captured_qkv(network: Any, images: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Run a transformers model on images [B,3,H,W]; return q, k, v [B,h,N,d] of every layer."""
    from transformers import AttentionInterface

    captured: list[tuple[Tensor, Tensor, Tensor]] = []

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        captured.append((q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, scale=kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("slowfast_lara_capture", attention)
    before = network.config._attn_implementation
    network.set_attn_implementation("slowfast_lara_capture")
    try:
        network(images)
    finally:
        network.set_attn_implementation(before)
    return captured


def attention_macs(
    setting: Setting, shape: tuple[int, int, int], width: int, num_frames: int
) -> float:
    """MACs of an attention over q, k, v of `shape` (batch, heads, tokens)."""
    head_dim = width // shape[1]
    if setting.name == EXACT:
        return 2 * shape[0] * shape[1] * shape[2] ** 2 * head_dim
    q, k, v = (torch.randn(*shape, head_dim) for _ in range(3))
    estimator: Estimator = build_estimator(
        setting.name, head_dim=head_dim, num_heads=shape[1], **_options(setting)
    ).eval()
    return count_macs(lambda: estimator(q, k, v, num_frames=num_frames))


def _options(setting: Setting) -> dict[str, Any]:
    number = {} if setting.number is None else {"num_landmarks": setting.number}
    return {**setting.options, **number}
