"""Fused attention of PyTorch, with a fixed order of backends on GPUs.

On recent GPUs PyTorch prefers cuDNN's attention. It has open bugs (NaN: pytorch/pytorch#196678),
and it is untested here with expanded queries, a single query, or values narrower than the keys. So
this module uses flash attention if possible, and memory-efficient attention otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from slowfast_lara.attention.tensors import is_exporting

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# In order of preference. MATH is the fallback, e.g. for float64, which has no fused backend.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa_supports(x: Tensor) -> bool:
    """Whether x is on a GPU or the meta device and has a dtype that fused GPU attention supports.

    False during export, because an exported program may run on another device.
    """
    on_gpu = x.device.type in ("cuda", "meta")
    return on_gpu and x.dtype in _FUSED_DTYPES and not is_exporting()


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` with `BACKENDS` on a GPU.

    On a GPU, head sizes that the fused backends do not support are padded with zeros.
    """
    width, multiple = v.shape[-1], 4 if q.dtype == torch.float32 else 8
    on_gpu = q.device.type in ("cuda", "meta")
    if on_gpu and (q.shape[-1] % multiple or width % multiple):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = (functional.pad(x, (0, -x.shape[-1] % multiple)) for x in (q, k, v))
    attention = functional.scaled_dot_product_attention
    if q.device.type != "cuda":
        out = attention(q, k, v, attn_mask, dropout_p, scale=scale)
    else:
        with sdpa_kernel(BACKENDS, set_priority=True):
            out = attention(q, k, v, attn_mask, dropout_p, scale=scale)
    return out[..., :width] if out.shape[-1] > width else out
