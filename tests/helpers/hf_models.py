"""Small models of transformers with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.internvl import modeling_internvl

SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
}
IMAGE = {"image_size": 48, "patch_size": 8}  # 36 patches
CLIP = {"image_size": 32, "num_frames": 8, "num_labels": 5}  # 4 temporal tokens of 16 patches


class SmallModel(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    layers: int  # number of attention layers that a forward pass replaces
    prefix: int = 0
    frames: int = 1


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 48, 48)}


def _clips(name: str = "pixel_values") -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(2, 8, 3, 32, 32)}


def _flattened_images() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 36, 192),
        "pixel_attention_mask": torch.ones(2, 36, dtype=torch.long),
        "spatial_shapes": torch.tensor([[6, 6], [6, 6]]),
    }


def _image_model(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{name.removesuffix('Model')}Config")
        return getattr(transformers, name)(config(**SIZES, **{**IMAGE, **arguments}))

    return build


def videomae() -> nn.Module:
    config = transformers.VideoMAEConfig(patch_size=8, tubelet_size=2, **CLIP, **SIZES)
    return transformers.VideoMAEForVideoClassification(config)


def vivit() -> nn.Module:
    config = transformers.VivitConfig(tubelet_size=[2, 8, 8], **CLIP, **SIZES)
    return transformers.VivitForVideoClassification(config)


def vjepa2() -> nn.Module:
    config = transformers.VJEPA2Config(
        crop_size=32,
        patch_size=8,
        frames_per_clip=16,  # the clips have 8
        tubelet_size=2,
        pred_hidden_size=24,
        pred_num_attention_heads=3,
        pred_num_hidden_layers=1,
        num_pooler_layers=1,
        num_labels=5,
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
    )
    return transformers.VJEPA2ForVideoClassification(config)


def siglip2() -> nn.Module:
    config = transformers.Siglip2VisionConfig(patch_size=8, num_patches=36, **SIZES)
    return transformers.Siglip2VisionModel(config)


def internvl() -> nn.Module:
    config = modeling_internvl.InternVLVisionConfig(image_size=[48, 48], patch_size=[8, 8], **SIZES)
    return modeling_internvl.InternVLVisionModel(config)


def timesformer() -> nn.Module:
    config = transformers.TimesformerConfig(patch_size=8, **CLIP, **SIZES)
    return transformers.TimesformerForVideoClassification(config)


MODELS = {
    "videomae": SmallModel(videomae, _clips(), 2, frames=4),
    "vivit": SmallModel(vivit, _clips(), 2, prefix=1, frames=4),
    "vjepa2": SmallModel(vjepa2, _clips("pixel_values_videos"), 3, frames=4),
    "vit": SmallModel(_image_model("ViTModel"), _images, 2, prefix=1),
    "deit": SmallModel(_image_model("DeiTModel"), _images, 2, prefix=2),
    "dinov2": SmallModel(_image_model("Dinov2Model"), _images, 2, prefix=1),
    "dinov2_with_registers": SmallModel(
        _image_model("Dinov2WithRegistersModel", num_register_tokens=3), _images, 2, prefix=4
    ),
    "dinov3": SmallModel(
        _image_model("DINOv3ViTModel", num_register_tokens=4), _images, 2, prefix=5
    ),
    "clip": SmallModel(_image_model("CLIPVisionModel"), _images, 2, prefix=1),
    "siglip": SmallModel(_image_model("SiglipVisionModel"), _images, 2),
    "siglip2": SmallModel(siglip2, _flattened_images, 2),
    "internvl": SmallModel(internvl, _images, 2, prefix=1),
}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in eval mode and its inputs. All weights are random, also of heads and registers."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model, MODELS[name].inputs()


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Logits of a classifier, or the features of a backbone."""
    out = model(**inputs)
    logits = getattr(out, "logits", None)
    return out.last_hidden_state if logits is None else logits
