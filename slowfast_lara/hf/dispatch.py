"""The attention interface of transformers: layers, attention functions, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import unwrap
from typing import Any

from torch import Tensor, nn

from slowfast_lara.lazy import check_installed

# Registered names are this prefix + purpose + "_on_" + the model's own implementation, e.g.
# "sdpa". The suffix is needed because transformers tests whether the name contains e.g. "flash".
_NAME = "slowfast_lara_"
# Arguments of attention functions that estimators support or may ignore.
_KNOWN = {
    "scaling",
    "dropout",
    "is_causal",
    "interpolate_pos_encoding",
    "num_items_in_batch",
    "output_hidden_states",
    "return_dict",
    "use_cache",
}


def attention_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of each layer whose `forward` uses ALL_ATTENTION_FUNCTIONS."""
    for path, module in model.named_modules():
        code = getattr(unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            yield path, module


def head_sizes(layer: Any) -> dict[str, int]:
    """Number of heads and head size of an attention layer, as arguments of `build_estimator`."""
    heads = _first_size(layer, "num_heads", "num_attention_heads")
    heads = heads or _first_size(layer.config, "num_attention_heads", "num_heads")
    size = _first_size(layer, "head_dim", "attention_head_size")
    width = _first_size(layer.config, "hidden_size", "embed_dim")
    if not heads or not (size or width):
        raise ValueError(
            f"cannot find the number and the size of heads of {type(layer).__name__} in its "
            "attributes or its config"
        )
    return {"num_heads": heads, "head_dim": size or width // heads}


def _first_size(owner: Any, *names: str) -> int:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def base_implementation(config: Any) -> str:
    """The name of a model's own attention; transformers uses "eager" if none is set."""
    name = config._attn_implementation or "eager"
    return name.partition("_on_")[2] if name.startswith(_NAME) else name


def register(purpose: str, implementation: str, function: Callable[..., Any]) -> str:
    """Register `function(implementation, ...)` as an attention function; returns its name."""
    check_installed("transformers", "hf")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = f"{_NAME}{purpose}_on_{implementation}"
    AttentionInterface.register(name, partial(function, implementation))
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        own_mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
        AttentionMaskInterface.register(name, partial(_mask, own_mask))
    return name


def _mask(own_mask: Callable[..., Tensor | None], **kwargs: Any) -> Tensor | None:
    """A model's own mask; None for bidirectional attention without padding or local windows.

    In torch.export, transformers would build a mask of ones in that case. Estimators do not support
    masks, so every layer would compute exact attention.
    """
    no_padding = kwargs.get("attention_mask") is None and kwargs.get("local_size") is None
    if kwargs.get("allow_is_bidirectional_skip") and no_padding:
        return None
    return own_mask(**kwargs)


def exact_function(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Any]]:
    """The model's own attention function, by the name of its implementation."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation == "eager":  # each modeling_*.py defines its own function
        return unwrap(type(module).forward).__globals__["eager_attention_forward"]
    return ALL_ATTENTION_FUNCTIONS[implementation]


def obstacle(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> str:
    """The reason why estimators do not support these arguments, or an empty string."""
    if mask is not None:
        return "attention mask"
    # Estimators compute no attention weights. If the config sets output_attentions, transformers
    # does not pass it in `kwargs`.
    if getattr(module.config, "output_attentions", False):
        return "output_attentions"
    is_causal = kwargs.get("is_causal")
    # transformers treats a layer without this attribute as causal.
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        return "causal attention"
    if query.shape[2] != key.shape[2]:
        return "cross attention"
    if query.shape[3] != value.shape[3]:
        return "different head sizes of keys and values"
    unknown = [
        name
        for name, given in kwargs.items()
        if name not in _KNOWN and given is not None and given is not False
    ]
    return f"unsupported argument {', '.join(unknown)}" if unknown else ""


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the key or value heads of grouped-query attention: [B,h',N,d] -> [B,h,N,d]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
