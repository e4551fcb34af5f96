"""Random weights with the names, shapes and layouts of public models, and files of them."""

import json
import struct

import numpy as np
import pytest
import torch

from slowfast_lara.errors import WeightsError
from slowfast_lara.models import VisionTransformer
from slowfast_lara.models.weights.pretrained import load_pretrained

DIM, DEPTH, HEADS, PATCH, CLASSES = 24, 2, 3, 56, 5
GRID = 224 // PATCH


def build(**changes):
    args = {
        "num_classes": CLASSES,
        "dim": DIM,
        "depth": DEPTH,
        "num_heads": HEADS,
        "patch_size": PATCH,
        "num_frames": 4,
        **changes,
    }
    torch.manual_seed(1)
    return VisionTransformer(**args)


def vit(dim=DIM, depth=DEPTH, patch=PATCH, grid=GRID, classes=7, pre_logits=True, make=None):
    """A ViT with timm's names and shapes."""
    generator = torch.Generator().manual_seed(0)
    make = make or (lambda *shape: torch.randn(*shape, generator=generator))
    layers = {
        "attn.qkv": (3 * dim, dim),
        "attn.proj": (dim, dim),
        "mlp.fc1": (4 * dim, dim),
        "mlp.fc2": (dim, 4 * dim),
        "norm1": (dim,),
        "norm2": (dim,),
    }
    shapes = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, grid**2 + 1, dim),
        "patch_embed.proj.weight": (dim, 3, patch, patch),
        "patch_embed.proj.bias": (dim,),
    }
    for i in range(depth):
        for name, shape in layers.items():
            shapes[f"blocks.{i}.{name}.weight"] = shape
            shapes[f"blocks.{i}.{name}.bias"] = shape[:1]
    shapes.update({"norm.weight": (dim,), "norm.bias": (dim,)})
    if pre_logits:
        shapes.update({"pre_logits.fc.weight": (dim, dim), "pre_logits.fc.bias": (dim,)})
    if classes:
        shapes.update({"head.weight": (classes, dim), "head.bias": (classes,)})
    return {name: make(*shape) for name, shape in shapes.items()}


def vit_npz(state, heads=HEADS):
    """The same weights in the layout of the original release."""
    dim = state["cls_token"].shape[2]
    arrays = {
        "cls": state["cls_token"],
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "pre_logits/kernel": state["pre_logits.fc.weight"].T,
        "pre_logits/bias": state["pre_logits.fc.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    for i in range(DEPTH):
        ours, theirs = f"blocks.{i}.", f"Transformer/encoderblock_{i}/"
        attention = theirs + "MultiHeadDotProductAttention_1/"
        for number, part in enumerate(("query", "key", "value")):
            rows = slice(number * dim, (number + 1) * dim)
            weight = state[ours + "attn.qkv.weight"][rows].T
            arrays[f"{attention}{part}/kernel"] = weight.reshape(dim, heads, -1)
            arrays[f"{attention}{part}/bias"] = state[ours + "attn.qkv.bias"][rows].reshape(
                heads, -1
            )
        arrays[attention + "out/kernel"] = state[ours + "attn.proj.weight"].T.reshape(
            heads, -1, dim
        )
        arrays[attention + "out/bias"] = state[ours + "attn.proj.bias"]
        for number, layer in enumerate(("fc1", "fc2")):
            dense = f"{theirs}MlpBlock_3/Dense_{number}/"
            arrays[dense + "kernel"] = state[f"{ours}mlp.{layer}.weight"].T
            arrays[dense + "bias"] = state[f"{ours}mlp.{layer}.bias"]
        for number, layer in ((0, "norm1"), (2, "norm2")):
            arrays[f"{theirs}LayerNorm_{number}/scale"] = state[f"{ours}{layer}.weight"]
            arrays[f"{theirs}LayerNorm_{number}/bias"] = state[f"{ours}{layer}.bias"]
    return {name: x.contiguous().numpy() for name, x in arrays.items()}


def safetensors(state, metadata=None):
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, x in state.items():
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        kind = {torch.float32: "F32", torch.float16: "F16"}[x.dtype]
        header[name] = {
            "dtype": kind,
            "shape": list(x.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return header, data


def write_safetensors(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def save(tmp_path, form, state):
    path = tmp_path / f"weights.{form.split('-')[0]}"
    if form == "pth":
        torch.save(state, path)
    elif form == "pth-old":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif form == "pth-ddp":
        torch.save({"model": {f"module.{name}": x for name, x in state.items()}, "epoch": 3}, path)
    elif form == "safetensors":
        write_safetensors(path, *safetensors(state, {"format": "pt"}))
    elif form == "npz":
        np.savez(path, **vit_npz(state))
    elif form == "npz-optimiser":
        np.savez(path, **{f"opt/target/{k}": x for k, x in vit_npz(state).items()}, step=1.0)
    return path


def refused(model, path):
    """Check that loading fails and changes nothing; returns the error message."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_pretrained(model, path)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message
