"""`replace_sdpa` replaces calls of PyTorch's `scaled_dot_product_attention` by an estimator."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slowfast_lara.hf.joint import JointEstimator, one_number
from slowfast_lara.hf.layouts import TokenLayout


class replace_sdpa(TorchFunctionMode):
    """Context manager: calls of `scaled_dot_product_attention` use an estimator.

    It is meant for models that are not from transformers, e.g. of timm or open_clip. Calls with
    masks, causal attention, grouped queries, cross attention or few tokens stay exact. Other calls
    are replaced and ignore `dropout_p`. `replaced` and `exact` count the calls. If no call was
    replaced, leaving the context raises a RuntimeError, because the model then ran with exact
    attention; torch.compile is the usual reason.

    Args:
        name: a key of `slowfast_lara.attention.ESTIMATORS`. `slowfast_lara.hf.use` documents the
            arguments not listed here.
        prefix: number of tokens before the patches.
        frames: number of temporal tokens.
        seed: seed of random draws in eval mode, the same for all layers.
        training: whether estimators with random samples draw new samples in every call.
    """

    def __init__(
        self,
        name: str,
        *,
        groups: int | None = None,
        num_landmarks: int | None = None,
        prefix: int = 0,
        frames: int = 1,
        seed: int = 0,
        kernels: str = "auto",
        training: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        number = one_number(groups, num_landmarks)
        self._build = partial(
            JointEstimator,
            name,
            TokenLayout(prefix, frames),
            number,
            seed=seed,
            kernels=kernels,
            **options,
        )
        self._training = training
        self._built: dict[tuple[int, int, torch.device], JointEstimator] = {}
        self.replaced = 0
        self.exact: Counter[str] = Counter()  # number of exact calls by reason
        self._estimator(1, 64, torch.device("cpu"))  # raises if an argument is invalid

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)
        if kind is None and not self.replaced:
            reasons = ", ".join(self.exact) or "it was not called, or only in torch.compile"
            raise RuntimeError(f"no call of scaled_dot_product_attention was replaced: {reasons}")

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        return self._attention(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        reason = ""
        if attn_mask is not None or is_causal:
            reason = "attention mask" if attn_mask is not None else "causal attention"
        elif query.ndim != 4 or query.shape != key.shape or query.shape != value.shape:
            reason = "shapes of q, k, v differ or are not [B,h,N,d]"
        else:
            joint = self._estimator(query.shape[1], query.shape[3], query.device)
            reason = joint.obstacle(query.shape[2])
        if reason:
            self.exact[reason] += 1
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        self.replaced += 1
        return joint(query, key, value, scale)

    def _estimator(self, heads: int, d: int, device: torch.device) -> JointEstimator:
        if (heads, d, device) not in self._built:
            joint = self._build(head_dim=d, num_heads=heads)
            self._built[heads, d, device] = joint.to(device).train(self._training)
        return self._built[heads, d, device]
