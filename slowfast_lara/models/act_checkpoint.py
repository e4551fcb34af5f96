"""Activation checkpointing: the backward pass recomputes the activations of a block."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# Values of VIT.ACT_CHECKPOINT_KEEP.
KEPT = ("nothing", "attention")
# Prefixes of operator names: PyTorch's fused attentions, and the kernels of this package.
_ATTENTIONS = ("aten::_scaled_dot_product_", "slowfast_lara::")


def checkpointed(block: nn.Module, tokens: Tensor, num_frames: int, keep: str) -> Tensor:
    """Call a block without storing its activations, except its input and those that `keep` selects.

    `keep` is one of KEPT. "attention" stores the outputs of fused attention operators and of this
    package's kernels. Estimators that use other operators are recomputed in the backward pass.
    """
    options: dict[str, Any] = {}
    if keep == "attention":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
    return checkpoint(block, tokens, num_frames, use_reentrant=False, **options)


def _keep_attention(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    if operator.name().startswith(_ATTENTIONS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
