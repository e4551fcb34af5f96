"""The names and layouts of the original ViT release (.npz), turned into ours.

Kernels there are [in, out], those of attention [D,h,d] and [h,d,D], that of the
patches HWIO. h heads, d head size, D = h*d.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

_PREFIX = "opt/target/"  # in files that hold the optimiser too
_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/(.+)")
_PARTS = {"query": 0, "key": 1, "value": 2}


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _linear(x: Tensor) -> Tensor:
    return x.permute(1, 0)


_NAMES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "cls": ("cls_token", _as_it_is),
    "embedding/kernel": ("patch_embed.proj.weight", lambda x: x.permute(3, 2, 0, 1)),
    "embedding/bias": ("patch_embed.proj.bias", _as_it_is),
    "Transformer/posembed_input/pos_embedding": ("pos_embed", _as_it_is),
    "Transformer/encoder_norm/scale": ("norm.weight", _as_it_is),
    "Transformer/encoder_norm/bias": ("norm.bias", _as_it_is),
    "pre_logits/kernel": ("pre_logits.fc.weight", _linear),
    "pre_logits/bias": ("pre_logits.fc.bias", _as_it_is),
    "head/kernel": ("head.weight", _linear),
    "head/bias": ("head.bias", _as_it_is),
}
_BLOCK_NAMES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "LayerNorm_0/scale": ("norm1.weight", _as_it_is),
    "LayerNorm_0/bias": ("norm1.bias", _as_it_is),
    "LayerNorm_2/scale": ("norm2.weight", _as_it_is),
    "LayerNorm_2/bias": ("norm2.bias", _as_it_is),
    "MultiHeadDotProductAttention_1/out/kernel": ("attn.proj.weight", lambda x: x.flatten(0, 1).T),
    "MultiHeadDotProductAttention_1/out/bias": ("attn.proj.bias", _as_it_is),
    "MlpBlock_3/Dense_0/kernel": ("mlp.fc1.weight", _linear),
    "MlpBlock_3/Dense_0/bias": ("mlp.fc1.bias", _as_it_is),
    "MlpBlock_3/Dense_1/kernel": ("mlp.fc2.weight", _linear),
    "MlpBlock_3/Dense_1/bias": ("mlp.fc2.bias", _as_it_is),
}
_QKV = re.compile(r"MultiHeadDotProductAttention_1/(query|key|value)/(kernel|bias)")


def is_vit_npz(weights: dict[str, Tensor]) -> bool:
    return any(name.startswith(("Transformer/", _PREFIX)) for name in weights)


def from_vit_npz(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], int | None]:
    """Our names and layouts, and the number of heads. Unknown names stay as they are."""
    ours: dict[str, Tensor] = {}
    qkv: dict[str, dict[int, Tensor]] = {}
    heads: set[int] = set()
    for full_name, x in weights.items():
        name = full_name[len(_PREFIX) :] if full_name.startswith(_PREFIX) else full_name
        if name != full_name and name in weights:
            raise ValueError(f"it holds {name} twice, with and without {_PREFIX}")
        block = _BLOCK.fullmatch(name)
        part = _QKV.fullmatch(block[2]) if block else None
        known = _BLOCK_NAMES.get(block[2]) if block else _NAMES.get(name)
        try:
            if block and part:
                weight = part[2] == "kernel"
                width, num_heads, size = (x if weight else x[None]).shape
                heads.add(num_heads)
                target = f"blocks.{block[1]}.attn.qkv.{'weight' if weight else 'bias'}"
                flat = x.reshape(width, num_heads * size).T if weight else x.flatten()
                qkv.setdefault(target, {})[_PARTS[part[1]]] = flat
            elif known:
                ours[f"blocks.{block[1]}.{known[0]}" if block else known[0]] = known[1](x)
            else:
                ours[full_name] = x
        except (IndexError, RuntimeError, ValueError):
            raise ValueError(f"its {name} is {list(x.shape)}, which is none of a ViT") from None
    for target, parts in qkv.items():
        if len({part.shape for part in parts.values()}) > 1:
            raise ValueError(f"its query, key and value differ in shape ({target})")
        if len(parts) == len(_PARTS):  # else it is reported as missing
            ours[target] = torch.cat([parts[i] for i in range(len(_PARTS))])
    if len(heads) > 1:
        raise ValueError(f"its layers have {sorted(heads)} attention heads")
    return ours, heads.pop() if heads else None
