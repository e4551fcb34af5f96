"""Operators `key_stats` and `key_stats_backward`: statistics of the keys per sample and frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import (
    block_size,
    cdiv,
    launch,
    matmul_precision,
    tile_for,
    with_unit_stride,
)
from slowfast_lara.attention.tensors import split_frames


@torch.library.custom_op("slowfast_lara::key_stats", mutates_args=())
def key_stats(
    w: Tensor, k: Tensor, v: Tensor | None, num_frames: int, norms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-sums L [B,h,F,C] and means M [B,h,F,C,d] of k, v [B,h,F*P,d] for samples w [B,h,C,d].

    Args:
        w: samples in the scaled space, float32; k is not scaled.
        v: values; None takes the keys.
        norms: weights are xi(k, w), with the norms of the keys, instead of exp(w.k).

    Returns:
        L in float32, M in the dtype of k, the remainder that rounding removed from M (empty for
        float32), and the largest weight of each sample [B,h,F,C].
    """
    from slowfast_lara.attention.kernels.triton_key_stats import key_stats_forward

    k, w = with_unit_stride(k), w.contiguous()
    v = k if v is None else with_unit_stride(v)
    B, h, C, d = w.shape
    log_sums, means, remainder, peak = out = _empty(w, k, num_frames)
    sizes = tile_for("key_stats_forward", k, d=d, C=C)
    launch(
        key_stats_forward,
        B * h * num_frames * cdiv(C, sizes["BLOCK_C"]),
        k,
        *(w, k, v, log_sums, peak, means, remainder),
        *_sizes(k, v, num_frames, C),
        **_constants(d, norms),
        VALUES=True,
        **sizes,
    )
    return out


def _empty(w: Tensor, k: Tensor, num_frames: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    split_frames(k, num_frames)  # raises if the tokens cannot be split
    B, h, C, d = w.shape
    log_sums = w.new_empty(B, h, num_frames, C)
    means = k.new_empty(B, h, num_frames, C, d)
    remainder = means.new_empty(0 if k.dtype == torch.float32 else means.shape)
    return log_sums, means, remainder, torch.empty_like(log_sums)


def _sizes(k: Tensor, v: Tensor, num_frames: int, C: int) -> tuple[Any, ...]:
    _, h, keys, d = k.shape
    return (*k.stride()[:3], *v.stride()[:3], d**-0.25, h, num_frames, keys // num_frames, C)


def _constants(d: int, norms: bool) -> dict[str, Any]:
    return {"D": d, "BLOCK_D": block_size(d), "NORMS": norms, "PRECISION": matmul_precision()}


@key_stats.register_fake
def _(w: Tensor, k: Tensor, v: Tensor | None, num_frames: int, norms: bool):
    return _empty(w, k, num_frames)


@torch.library.custom_op("slowfast_lara::key_stats_backward", mutates_args=())
def key_stats_backward(
    w: Tensor,
    k: Tensor,
    v: Tensor | None,
    num_frames: int,
    norms: bool,
    log_sums: Tensor,
    means: Tensor,
    remainder: Tensor,
    peak: Tensor,
    grad_log_sums: Tensor,
    grad_means: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of w, k and v (empty without v)."""
    from slowfast_lara.attention.kernels import triton_key_stats

    tied = v is None
    k, w = with_unit_stride(k), w.contiguous()
    v = k if v is None else with_unit_stride(v)
    (B, h, keys, d), C = k.shape, w.shape[2]
    grads = (grad_log_sums.contiguous(), grad_means.contiguous())
    tensors = (w, k, v, log_sums, peak, means, remainder, *grads)
    grad_w, grad_k = torch.empty_like(w), k.new_empty(k.shape)
    grad_v = v.new_empty(0 if tied else v.shape)
    shared = _constants(d, norms)
    sizes = tile_for("key_stats_backward_tied" if tied else "key_stats_backward_keys", k, d=d, C=C)
    launch(
        triton_key_stats.key_stats_backward_keys,
        B * h * num_frames * cdiv(keys // num_frames, sizes["BLOCK_N"]),
        k,
        *(*tensors, grad_k, grad_v),
        *_sizes(k, v, num_frames, C),
        **shared,
        VALUES=True,
        TIED=tied,
        **sizes,
    )
    sizes = tile_for("key_stats_backward_samples", k, d=d, C=C)
    launch(
        triton_key_stats.key_stats_backward_samples,
        B * h * cdiv(C, sizes["BLOCK_C"]),
        k,
        *(*tensors, grad_w),
        *_sizes(k, v, num_frames, C),
        **shared,
        **sizes,
    )
    return grad_w, grad_k, grad_v


@key_stats_backward.register_fake
def _(w: Tensor, k: Tensor, v: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_v = k.new_empty(0 if v is None else v.shape)
    return w.new_empty(w.shape), k.new_empty(k.shape), grad_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, k, v, ctx.num_frames, ctx.norms = inputs
    ctx.set_materialize_grads(False)  # the last two outputs have no gradient
    ctx.save_for_backward(w, k, v, *output)


def _backward(
    ctx: Any, grad_log_sums: Tensor | None, grad_means: Tensor | None, *_: None
) -> tuple[Any, ...]:
    w, k, v, *stats = ctx.saved_tensors
    if grad_log_sums is None:
        grad_log_sums = torch.zeros_like(stats[0])
    if grad_means is None:
        grad_means = torch.zeros_like(stats[1])
    grad_w, grad_k, grad_v = torch.ops.slowfast_lara.key_stats_backward(
        w, k, v, ctx.num_frames, ctx.norms, *stats, grad_log_sums, grad_means
    )
    return grad_w, grad_k, None if v is None else grad_v, None, None


key_stats.register_autograd(_backward, setup_context=_save)


def query_normaliser(landmarks: Tensor, q: Tensor) -> Tensor:
    """log Z_c = log sum_n exp(q_n.q~_c), [B,h,C]: landmarks in the scaled space, q not."""
    from slowfast_lara.attention.kernels.triton_key_stats import key_stats_forward

    (B, h, _, d), C = q.shape, landmarks.shape[2]
    out = landmarks.new_empty(B, h, C)
    sizes = tile_for("query_normaliser", q, d=d, C=C)
    launch(
        key_stats_forward,
        B * h * cdiv(C, sizes["BLOCK_C"]),
        q,
        *(landmarks, q, q, out, out, q, q),
        *_sizes(q, q, 1, C),
        **_constants(d, norms=False),
        VALUES=False,
        **sizes,
    )
    return out


def query_normaliser_backward(
    landmarks: Tensor, q: Tensor, log_z: Tensor, grad_log_z: Tensor, grad_q: Tensor
) -> Tensor:
    """grad_q (float32) plus the gradient of q through `query_normaliser`, in the dtype of q."""
    from slowfast_lara.attention.kernels.triton_key_stats import key_stats_backward_keys

    (B, h, N, d), C = q.shape, landmarks.shape[2]
    out = q.new_empty(q.shape)
    sizes = tile_for("query_normaliser_backward", q, d=d, C=C)
    launch(
        key_stats_backward_keys,
        B * h * cdiv(N, sizes["BLOCK_N"]),
        q,
        *(landmarks, q, q, log_z, log_z, q, q, grad_log_z, q, out, grad_q),
        *_sizes(q, q, 1, C),
        **_constants(d, norms=False),
        VALUES=False,
        TIED=False,
        **sizes,
    )
    return out
