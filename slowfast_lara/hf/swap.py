"""`use` and `report`: replace the attention of a transformers model by an estimator.

Models of transformers look up their attention function by name (`config._attn_implementation`) and
call it with the attention layer as first argument. `use` adds an estimator as a submodule to every
attention layer that is not causal, so that copying, moving, casting and exporting the model include
the estimators. `use` also sets `config._attn_implementation` to the name of an attention function
of this module. If an estimator does not support the arguments, that function calls the model's own
attention function; `report` lists the reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.hf.dispatch import (
    attention_layers,
    base_implementation,
    exact_function,
    head_sizes,
    obstacle,
    register,
    repeat_heads,
)
from slowfast_lara.hf.joint import JointEstimator, one_number
from slowfast_lara.hf.layouts import TokenLayout, token_layout

# Name of the submodule that `use` adds to an attention layer.
CHILD = "slowfast_lara"


class SwappedAttention(nn.Module):
    """The estimator of one attention layer; `status` describes its last call ("": none yet)."""

    def __init__(self, joint: JointEstimator, implementation: str) -> None:
        super().__init__()
        self.joint, self.implementation = joint, implementation
        self.status = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the attention function in a process that unpickles a model."""
        super().__setstate__(state)
        register("use", self.implementation, _attention)


def use(
    model: nn.Module,
    name: str,
    *,
    groups: int | None = None,
    num_landmarks: int | None = None,
    prefix: int | None = None,
    frames: int | None = None,
    seed: int = 0,
    kernels: str = "auto",
    **options: Any,
) -> nn.Module:
    """Replace the attention of a transformers model, in place; returns the model.

    Causal layers are unchanged. Attention dropout applies only where the model's own attention
    runs.

    Args:
        model: a model that dispatches its attention by `config._attn_implementation`.
        name: a key of `slowfast_lara.attention.ESTIMATORS`; "exact" restores the model's
            own attention.
        groups: number of groups, landmarks or samples; default: 128.
        num_landmarks: another name of `groups`.
        prefix: number of tokens before the patches; default: from the model's config, or 0 for
            unknown model types. These tokens attend exactly, and all tokens attend to them.
        frames: number of temporal tokens; default: from the model's config, or 1 for unknown
            model types.
        seed: seed of random draws in eval mode; layer i uses seed + i.
        kernels: as in `build_estimator`.
        options: as in `build_estimator`.

    Raises:
        ValueError: the model has no layer that `use` can replace, or a value is not allowed.
        TypeError: an option is unknown, or both `groups` and `num_landmarks` are given.
    """
    number = one_number(groups, num_landmarks)
    layers = replaceable_layers(model)
    estimators = {}
    if name != "exact":
        for index, (path, layer) in enumerate(layers.items()):
            layout = layout_of(layer, prefix, frames)
            arguments = {**head_sizes(layer), "seed": seed + index, "kernels": kernels}
            estimators[path] = JointEstimator(name, layout, number, **arguments, **options)
    for path, layer in layers.items():
        own = base_implementation(layer.config)
        if hasattr(layer, CHILD):
            delattr(layer, CHILD)
        if path in estimators:
            _forget_buffers(estimators[path])
            child = SwappedAttention(estimators[path], own).train(layer.training)
            parameter = next(layer.parameters(), torch.empty(0))
            layer.add_module(CHILD, child.to(parameter.device))
            own = register("use", own, _attention)
        # The public setter would also change the configs of submodels.
        layer.config._attn_implementation_internal = own
    return model


def replaceable_layers(model: nn.Module) -> dict[str, Any]:
    """Map paths to the non-causal layers of `attention_layers`; ValueError if there are none."""
    layers = {
        path: layer
        for path, layer in attention_layers(model)
        if not getattr(layer, "is_causal", False)
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not dispatch the attention of any non-causal layer "
            "through transformers' AttentionInterface, so it cannot be replaced; for a model that "
            "calls scaled_dot_product_attention itself, use hf.replace_sdpa"
        )
    return layers


def layout_of(layer: Any, prefix: int | None, frames: int | None) -> TokenLayout:
    """The token layout from a layer's config; `prefix` and `frames` override it if not None."""
    layout = token_layout(layer.config)
    if prefix is not None:
        layout = layout._replace(prefix=prefix)
    return layout if frames is None else layout._replace(frames=frames, patches_of_frame=0)


def _forget_buffers(joint: JointEstimator) -> None:
    """Exclude buffers (Performer's samples) from the state dict: the seed determines them."""
    for name, buffer in list(joint.estimator.named_buffers(recurse=False)):
        joint.estimator.register_buffer(name, buffer, persistent=False)


def _attention(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Call the layer's estimator if there is one and if it supports the arguments.

    Otherwise, call the model's own attention.
    """
    child: SwappedAttention | None = getattr(module, CHILD, None)
    reason = "no estimator"
    if child is not None:
        reason = obstacle(module, query, key, value, attention_mask, kwargs)
        reason = reason or child.joint.obstacle(query.shape[2])
        child.status = f"exact: {reason}" if reason else _status(child.joint, query, kwargs)
    if child is None or reason:
        function = exact_function(module, implementation)
        return function(module, query, key, value, attention_mask, **kwargs)
    key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    out = child.joint(query, key, value, kwargs.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


def _status(joint: JointEstimator, query: Tensor, kwargs: dict[str, Any]) -> str:
    name = next(name for name, cls in ESTIMATORS.items() if type(joint.estimator) is cls)
    kind = "groups" if joint.estimator.counts_keys_of_a_frame else "landmarks"
    kind = "samples" if name == "performer" else kind
    words = [name, f"{joint.number} {kind}"] if joint.number else [name]
    words.append(f"{query.shape[2]} tokens")
    frames = joint.layout.frames_of(query.shape[2])
    if frames > 1:
        words.append(f"{frames} frames")
    if joint.layout.prefix:
        words.append(f"prefix {joint.layout.prefix}")
    if kwargs.get("dropout"):
        words.append("without attention dropout")
    return ", ".join(words)


class LayerReport(NamedTuple):
    layer: str
    attention: str  # description of the estimator, "exact: " and the reason, or "not called yet"


class Report(list[LayerReport]):
    """One entry per attention layer; `str(report)` has one line per layer."""

    def __str__(self) -> str:
        return "\n".join(f"{layer}: {attention}" for layer, attention in self)


def report(model: nn.Module) -> Report:
    """Report the estimator that each layer last used, or why its attention was exact.

    Forward passes traced by torch.export are not recorded.
    """
    return Report(
        LayerReport(path, _layer_status(layer)) for path, layer in attention_layers(model)
    )


def _layer_status(layer: Any) -> str:
    child: SwappedAttention | None = getattr(layer, CHILD, None)
    if child is None:
        causal = getattr(layer, "is_causal", False)
        return "exact: causal attention" if causal else "exact: not replaced"
    current = layer.config._attn_implementation
    if current == base_implementation(layer.config):
        return f"exact: the model's attention implementation is now {current!r}"
    return child.status or "not called yet"
