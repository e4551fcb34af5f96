"""Folders of ViViT, VideoMAE and TimeSformer as transformers saves them, with random weights."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers.models.videomae.image_processing_pil_videomae import VideoMAEImageProcessorPil

KINDS = ("vivit", "videomae", "timesformer")
WIDTH = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 50}
SIZES = [
    {"image_size": 32, "frames": 4, "patch": 8, "depth": 2, "classes": 5, **WIDTH},
    {"image_size": 48, "frames": 6, "patch": 16, "depth": 1, "classes": 3, "hidden_size": 40,
     "num_attention_heads": 5, "intermediate_size": 97, "qkv_bias": False},
]  # fmt: skip


def hub_model(kind, *, image_size, frames, patch, depth, classes, qkv_bias=True, **sizes):
    """A model of transformers with random weights, also of norms and biases."""
    names = {number: f"name {number}" for number in range(classes)}
    shared = {
        "image_size": image_size,
        "num_frames": frames,
        "num_hidden_layers": depth,
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        **sizes,
    }
    torch.manual_seed(len(kind) + depth)
    if kind == "vivit":
        config = transformers.VivitConfig(
            tubelet_size=[2, patch, patch], qkv_bias=qkv_bias, **shared
        )
        model = transformers.VivitForVideoClassification(config)
    elif kind == "videomae":
        config = transformers.VideoMAEConfig(patch_size=patch, qv_bias=qkv_bias, **shared)
        model = transformers.VideoMAEForVideoClassification(config)
    else:
        config = transformers.TimesformerConfig(patch_size=patch, qkv_bias=qkv_bias, **shared)
        model = transformers.TimesformerForVideoClassification(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def processor_of(kind, **arguments):
    if kind == "vivit":
        return transformers.VivitImageProcessor(**arguments)
    return VideoMAEImageProcessorPil(**arguments)


def write_folder(folder, kind, sizes=SIZES[0], short_side=None):
    """The model and its processor, saved by transformers."""
    model = hub_model(kind, **sizes)
    model.save_pretrained(folder)
    crop = sizes["image_size"]
    processor = processor_of(
        kind,
        size={"shortest_edge": short_side or crop},
        crop_size={"height": crop, "width": crop},
        image_mean=[0.4, 0.45, 0.5],
        image_std=[0.2, 0.25, 0.3],
    )
    processor.save_pretrained(folder)
    return model, processor
