"""Conversion of the original ViT release (.npz) to this package's names and layouts.

The release stores linear layers as [in,out], the projections to q, k and v as [D,h,d], the output
projection of attention as [h,d,D], and the patch embedding as [height,width,in,out]. Here h is the
number of heads, d the head size, and D = h*d.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

_PREFIX = "opt/target/"  # prefix of names in files that also hold the optimizer state
_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/(.+)")
_QKV = re.compile(r"MultiHeadDotProductAttention_1/(query|key|value)/(kernel|bias)")
_TENSORS = {"cls": "cls_token", "Transformer/posembed_input/pos_embedding": "pos_embed"}
_MODULES = {
    "embedding": "patch_embed.proj",
    "Transformer/encoder_norm": "norm",
    "pre_logits": "pre_logits.fc",
    "head": "head",
    "LayerNorm_0": "norm1",
    "LayerNorm_2": "norm2",
    "MultiHeadDotProductAttention_1/out": "attn.proj",
    "MlpBlock_3/Dense_0": "mlp.fc1",
    "MlpBlock_3/Dense_1": "mlp.fc2",
}
_PARAMETERS = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def is_vit_npz(weights: dict[str, Tensor]) -> bool:
    return any(name.startswith(("Transformer/", _PREFIX)) for name in weights)


def from_vit_npz(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], int | None]:
    """Return the converted weights and the number of heads (None without weights of q, k and v).

    Unknown names are kept. Raises ValueError if the shapes do not fit a ViT.
    """
    ours: dict[str, Tensor] = {}
    qkv: dict[str, dict[str, Tensor]] = {}
    heads: set[int] = set()
    for full_name, x in weights.items():
        name = full_name.removeprefix(_PREFIX)
        if name != full_name and name in weights:
            raise ValueError(f"{name} exists twice, with and without {_PREFIX}")
        block = _BLOCK.fullmatch(name)
        prefix, name_in_block = (f"blocks.{block[1]}.", block[2]) if block else ("", name)
        part = _QKV.fullmatch(name_in_block) if block else None
        new_name = _new_name(name_in_block)
        try:
            if part:
                *_, num_heads, _ = x.shape
                heads.add(num_heads)
                target = f"{prefix}attn.qkv.{_PARAMETERS[part[2]]}"
                qkv.setdefault(target, {})[part[1]] = x.flatten(-2).t()
            elif new_name:
                ours[prefix + new_name] = _new_layout(name_in_block, x)
            else:
                ours[full_name] = x
        except (IndexError, RuntimeError, ValueError):
            raise ValueError(f"{name} is {list(x.shape)}; the shape does not fit a ViT") from None
    for target, parts in qkv.items():
        if len({part.shape for part in parts.values()}) > 1:
            raise ValueError(f"query, key and value differ in shape ({target})")
        if len(parts) == 3:  # else the loader reports `target` as missing
            ours[target] = torch.cat([parts[name] for name in ("query", "key", "value")])
    if len(heads) > 1:
        raise ValueError(f"layers differ in their number of attention heads: {sorted(heads)}")
    return ours, heads.pop() if heads else None


def _new_name(name: str) -> str | None:
    module, _, parameter = name.rpartition("/")
    if module in _MODULES and parameter in _PARAMETERS:
        return f"{_MODULES[module]}.{_PARAMETERS[parameter]}"
    return _TENSORS.get(name)


def _new_layout(name: str, x: Tensor) -> Tensor:
    if not name.endswith("/kernel"):
        return x
    if name == "embedding/kernel":
        return x.permute(3, 2, 0, 1)
    return x.flatten(0, 1).T if name.endswith("/out/kernel") else x.permute(1, 0)
