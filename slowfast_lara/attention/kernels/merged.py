"""Operators `merged` and `merged_backward`: merged-key attention (attention/merged.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import launch, with_unit_stride
from slowfast_lara.attention.kernels.tiles import QUERY_PARTS, block_size
from slowfast_lara.attention.tensors import split_frames

# Largest sizes for which the kernels have tiles.
MAX_HEAD_DIM = 128
MAX_GROUPS = 128
MAX_KEYS = 1024
MAX_CENTRES_OF_ROUND = 32


def unsupported_groups(head_dim: int, num_groups: int, rounds: int, keys: int = 0) -> str:
    """Description of a size that the kernels of `merged` do not support, "" if none.

    `keys` is the number of keys per frame; with 0 (unknown), it is not checked.
    """
    centres = -(-(num_groups - 1) // rounds)
    for what, size, limit in (
        ("a head size above", head_dim, MAX_HEAD_DIM),
        ("more groups than", num_groups, MAX_GROUPS),
        ("more centres in a round than", centres, MAX_CENTRES_OF_ROUND),
        ("more keys in a frame than", keys, MAX_KEYS),
    ):
        if size > limit:
            return f"{what} {limit} ({size})"
    return ""


@torch.library.custom_op("slowfast_lara::merged", mutates_args=())
def merged(
    q: Tensor, k: Tensor, v: Tensor, num_frames: int, num_groups: int, rounds: int, values: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Merged-key attention of q [B,h,N,d] over m = num_groups groups of k, v [B,h,F*P,d] per frame.

    Returns:
        The output [B,h,N,F,d]; the group of each key and its weight in the group [B,h,F,P]; k_c and
        v_c [B,h,F,m,d] and b_c [B,h,F,m] (attention/merged.py); the largest logit of the mean query
        in each frame [B,h,F]; partial sums of q and q^2 [B,h,QUERY_PARTS,2,d]. The weights, b_c,
        the largest logits and the partial sums are float32.
    """
    q, k, v = map(with_unit_stride, (q, k, v))
    out = _empty(q, k, v, num_frames, num_groups, rounds, values)
    attention, groups, shares, kc, vc, biases, top, moments = out
    (B, h, N, d), P, scale = q.shape, groups.shape[3], q.shape[3] ** -0.5
    args, programs = (q, moments, *q.stride()[:3], h, N), B * h * QUERY_PARTS
    launch("group_means.query_moments", q, *args, programs=programs, d=d)
    candidates = block_size(2 * -(-(num_groups - 1) // rounds))
    centres = max(16, candidates // 2)
    norms, nearness = torch.empty_like(shares), torch.empty_like(shares)
    chosen = groups.new_empty(B, h, num_frames, candidates + centres)
    launch(
        "groups.choose_groups",
        k,
        *(k, v, moments, groups, shares, kc, vc, biases, top, norms, nearness, chosen),
        *(*k.stride()[:3], *v.stride()[:3], scale, values),
        *(h, N, num_frames, P, num_groups, rounds),
        programs=B * h * num_frames,
        d=d,
        C=num_groups,
        BLOCK_P=block_size(P),
        BLOCK_R=candidates,
        BLOCK_Z=centres,
    )
    launch(
        "group_attention.attend_forward",
        q,
        *(q, kc, vc, biases, attention.permute(0, 3, 2, 1, 4), *q.stride()[:3], scale),
        *(h, N, num_frames, num_groups),
        programs=B * h,
        blocks={"N": N},
        d=d,
        C=num_groups,
    )
    return out


@merged.register_fake
def _empty(q: Tensor, k: Tensor, v: Tensor, num_frames: int, num_groups: int, *_: Any):
    (B, h, N, d), P = q.shape, split_frames(k, num_frames).shape[3]
    groups = q.new_empty(B, h, num_frames, P, dtype=torch.int32)
    shares = torch.empty_like(groups, dtype=torch.float32)
    means = [q.new_empty(B, h, num_frames, num_groups, d) for _ in range(2)]
    biases, top = (shares.new_empty(B, h, num_frames, *size) for size in ((num_groups,), ()))
    moments = shares.new_empty(B, h, QUERY_PARTS, 2, d)
    # [B,F,N,h,d] is the memory layout that the temporal stage of trajectory attention reads.
    out = q.new_empty(B, num_frames, N, h, d).permute(0, 3, 2, 1, 4)
    return out, groups, shares, *means, biases, top, moments


@torch.library.custom_op("slowfast_lara::merged_backward", mutates_args=())
def merged_backward(
    q: Tensor, k: Tensor, v: Tensor,
    groups: Tensor, shares: Tensor, kc: Tensor, vc: Tensor, biases: Tensor, top: Tensor,
    moments: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    q, k, v = map(with_unit_stride, (q, k, v))
    grad = with_unit_stride(grad.permute(0, 3, 2, 1, 4))  # [B,F,N,h,d]
    (B, h, N, d), (F, m), P, scale = q.shape, kc.shape[2:4], groups.shape[3], q.shape[3] ** -0.5
    attend = (q, kc, vc, biases, grad)
    strides = (*q.stride()[:3], *grad.stride()[:4], scale, h, N, F, m)
    grads = [torch.empty_like(x) for x in (kc, vc, biases)]
    kernel, programs = "group_attention.attend_backward_groups", B * h * F
    sizes: dict[str, Any] = {"d": d, "C": m}
    args = (*attend, *grads, *strides)
    launch(kernel, q, *args, programs=programs, blocks={"E": d}, **sizes)
    grad_q, grad_k, grad_v = out = _empty_gradients(q, k, v)
    grad_mean = biases.new_empty(B, h, F, d)
    scratch = (torch.empty_like(shares), torch.empty_like(biases))
    launch(
        "group_means.group_means_backward",
        k,
        *(k, v, moments, groups, shares, top, *grads, grad_k, grad_v, grad_mean, *scratch),
        *(*k.stride()[:3], *v.stride()[:3], scale, h, N, F, P, m),
        programs=B * h * F,
        **sizes,
    )
    args = (*attend, grad_mean, grad_q, *strides)
    kernel = "group_attention.attend_backward_queries"
    launch(kernel, q, *args, programs=B * h, blocks={"N": N}, **sizes)
    return out


@merged_backward.register_fake
def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 7
    grads = torch.ops.slowfast_lara.merged_backward(*ctx.saved_tensors, grad)
    return *grads, None, None, None, None


merged.register_autograd(_backward, setup_context=_save)
