"""Conversion of other projects' weights to this package's names.

- Hugging Face: ViT, DINOv2 with and without registers, ViViT, VideoMAE and TimeSformer. Separate
  projections to q, k and v are concatenated. VideoMAE has no key bias: zeros are used.
  TimeSformer's `temporal_dense` is folded into the output projection of its temporal attention.
- timm and Meta: DINOv2 and DeiT III. Only `reg_token` is renamed.
- LayerScale multiplies the output of a linear layer by `gamma`; gamma is folded into that layer.
- Position embeddings that lack CLS get zeros for CLS.

Unknown names are kept. In a block of a Hugging Face file, they get the prefix `blocks.N.`, so that
the loader rejects them as unknown parameters of a block.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

# Example of a Hugging Face name: "dinov2.encoder.layer.0.norm1.weight". Base models have no
# "dinov2." prefix.
_HF_BLOCK = re.compile(r"(?:[a-z0-9_]+\.)?(?:encoder\.)?layers?\.(\d+)\.(.+)")
_HF_TOP = re.compile(r"(?:[a-z0-9_]+\.)?(embeddings\..+|layernorm\.(?:weight|bias))")
_TENSORS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.register_tokens": "register_tokens",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.time_embeddings": "temp_embed",
    "reg_token": "register_tokens",
}
_MODULES = {
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "fc_norm": "norm",
    "classifier": "head",
}
_BLOCK_MODULES = {
    "attention.attention.qkv": "attn.qkv",
    "temporal_attention.attention.qkv": "timeattn.qkv",
    "temporal_attention.output.dense": "timeattn.proj",
    "temporal_layernorm": "norm3",
    "attention.output.dense": "attn.proj",
    "attention.o_proj": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "layer_scale1": "ls1",
    "layer_scale2": "ls2",
    "ls1": "ls1",
    "ls2": "ls2",
}
_QKV = re.compile(
    r"attention\.(?:attention\.(query|key|value)\.|([qkv])_proj\.|attention\.([qv])_)(weight|bias)"
)
_GAMMA = re.compile(r"(blocks\.\d+\.)(?:ls([12])\.(?:gamma|lambda1)|gamma_([12]))")


def to_own_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to this package's names.

    Raises ValueError if weights that are combined differ in shape or are incomplete, or if two
    names become one.
    """
    if any("embeddings.patch_embeddings." in name for name in weights):
        weights = _from_hugging_face(weights)
    weights = {_TENSORS.get(name, name): x for name, x in weights.items()}
    _fold_layer_scale(weights)
    if "cls_token" in weights and _is_grid(weights.get("pos_embed")):
        positions = weights["pos_embed"]
        zero = positions.new_zeros(1, 1, positions.shape[2])
        weights["pos_embed"] = torch.cat((zero, positions), dim=1)
    return weights


def _is_grid(positions: Tensor | None) -> bool:
    """Whether a tensor has the shape [1,side**2,D] with side > 1."""
    if positions is None or positions.ndim != 3 or positions.shape[0] != 1:
        return False
    return math.isqrt(positions.shape[1]) ** 2 == positions.shape[1] > 1


def _from_hugging_face(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    ours: dict[str, Tensor] = {}
    qkv: dict[str, dict[str, Tensor]] = {}
    for full_name, x in weights.items():
        block = _HF_BLOCK.fullmatch(full_name)
        part = _QKV.fullmatch(block[2]) if block else None
        if part and block:
            target = f"blocks.{block[1]}.attn.qkv.{part[4]}"
            qkv.setdefault(target, {})[(part[1] or part[2] or part[3])[0]] = x
            continue
        top = _HF_TOP.fullmatch(full_name)
        prefix, name = (f"blocks.{block[1]}.", block[2]) if block else ("", full_name)
        name = top[1] if top else name
        module, _, parameter = name.rpartition(".")
        modules = _BLOCK_MODULES if block else _MODULES
        new_name = f"{modules[module]}.{parameter}" if module in modules else name
        new_name = prefix + _TENSORS.get(new_name, new_name)
        if new_name in ours:
            raise ValueError(f"{new_name} exists twice, the second time as {full_name}")
        ours[new_name] = x
    biases = [parts for target, parts in qkv.items() if target.endswith("bias")]
    if all(set(parts) == set("qv") for parts in biases):  # VideoMAE: no layer has a key bias
        for parts in biases:
            parts["k"] = torch.zeros_like(parts["q"])
    for target, parts in qkv.items():
        if set(parts) != set("qkv") or len({x.shape for x in parts.values()}) > 1:
            raise ValueError(f"{target} needs q, k and v of equal shapes, has {_shapes(parts)}")
        ours[target] = torch.cat([parts[name] for name in "qkv"])
    _fold_temporal_dense(ours)
    patches = ours.get("patch_embed.proj.weight")
    if patches is not None and patches.ndim == 5:
        for old, new in (("patch_embed.proj.", "patch_embed_3d.proj."), ("pos_embed", "st_embed")):
            ours = {re.sub(f"^{re.escape(old)}", new, name): x for name, x in ours.items()}
    return ours


def _fold_temporal_dense(weights: dict[str, Tensor]) -> None:
    """Compose the output projection of temporal attention with the linear layer after it."""
    for name in [name for name in weights if name.endswith(".temporal_dense.weight")]:
        block = name.removesuffix("temporal_dense.weight")
        names = [f"{block}{x}" for x in ("timeattn.proj.weight", "timeattn.proj.bias")]
        names += [name, f"{block}temporal_dense.bias"]
        if any(x not in weights for x in names):
            continue  # the loader rejects the file: the model has no `temporal_dense`
        weight, bias, dense, dense_bias = (weights[x].double() for x in names)
        if not weight.shape == dense.shape == bias.shape * 2 == dense_bias.shape * 2:
            raise ValueError(
                f"{name} is {list(dense.shape)}, which does not fit {names[0]} of shape "
                f"{list(weight.shape)}"
            )
        weights[names[0]] = (dense @ weight).float()
        weights[names[1]] = (dense @ bias + dense_bias).float()
        del weights[name], weights[names[3]]


def _shapes(parts: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(x.shape)!s:.80}" for name, x in sorted(parts.items()))


def _fold_layer_scale(weights: dict[str, Tensor]) -> None:
    """Multiply the weights and biases before each LayerScale by its gamma."""
    for name, match in [(name, _GAMMA.fullmatch(name)) for name in weights]:
        if match is None:
            continue
        layer = match[1] + {"1": "attn.proj", "2": "mlp.fc2"}[match[2] or match[3]]
        gamma, parameters = weights[name], (f"{layer}.weight", f"{layer}.bias")
        if not weights.keys() >= set(parameters):
            continue  # the loader reports the missing parameter
        for parameter in parameters:
            x = weights[parameter]
            if gamma.ndim != 1 or x.shape[:1] != gamma.shape:
                raise ValueError(
                    f"{name} is {list(gamma.shape)}, which does not fit {parameter} of shape "
                    f"{list(x.shape)}"
                )
            wide = torch.promote_types(x.dtype, torch.float32)
            weights[parameter] = gamma.to(wide).view(-1, *(1,) * (x.ndim - 1)) * x.to(wide)
        del weights[name]
