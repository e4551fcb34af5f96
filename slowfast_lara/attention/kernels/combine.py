"""Operators `combine` and `combine_backward`: the estimate from the key statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.key_stats import query_normaliser, query_normaliser_backward
from slowfast_lara.attention.kernels.launch import (
    block_size,
    cdiv,
    launch,
    matmul_precision,
    tile_for,
    with_unit_stride,
)
from slowfast_lara.attention.kernels.tiles import FRAME_GROUP


@torch.library.custom_op("slowfast_lara::combine", mutates_args=())
def combine(
    q: Tensor,
    w: Tensor,
    log_sums: Tensor,
    means: Tensor,
    landmarks: Tensor | None,
    balance: Tensor | None,
    gain: Tensor | None,
    shares: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The estimate [B,h,N,F,d] for queries q [B,h,N,d] and samples w [B,h,C,d].

    Args:
        log_sums: L [B,h,F,C], plus the samples' log-weights.
        means: M [B,h,F,C,d], in the dtype of q. All other tensors are float32.
        landmarks, balance, gain, shares: terms of alpha (samples.py), or all None.

    Samples and landmarks are in the scaled space, q is not.

    Returns:
        The estimate, and the log-normalisers log Z [B,h,C] of the alignment scores (empty without
        landmarks).
    """
    from slowfast_lara.attention.kernels.triton_combine import combine_forward

    q, tensors, log_z = _prepare(q, w, log_sums, means, landmarks, balance, gain, shares)
    (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
    out = q.new_empty(B, F, N, h, d)
    sizes = tile_for("combine_forward", q, d=d, C=C)
    launch(
        combine_forward,
        B * h * cdiv(N, sizes["BLOCK_N"]),
        q,
        *(*tensors, out),
        *(*q.stride()[:3], d**-0.25, h, N, F, C),
        **_constants(d, landmarks is not None),
        BLOCK_C=block_size(C),
        **sizes,
    )
    # The memory layout that the temporal stage of trajectory attention reads.
    return out.permute(0, 3, 2, 1, 4), log_z


def _prepare(
    q: Tensor,
    w: Tensor,
    log_sums: Tensor,
    means: Tensor,
    landmarks: Tensor | None,
    *columns: Tensor | None,
    log_z: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """q, the tensors that every kernel of `combine` takes, and log Z."""
    q, w = with_unit_stride(q), w.contiguous()
    tensors = (q, w, log_sums.contiguous(), means.contiguous())
    if landmarks is None:  # the kernels do not read the five tensors
        return q, (*tensors, *[w] * 5), w.new_empty(0)
    landmarks = landmarks.contiguous()
    if log_z is None:
        log_z = query_normaliser(landmarks, q)
    return (
        q,
        (*tensors, landmarks, log_z, *(x.contiguous() for x in columns if x is not None)),
        log_z,
    )


def _constants(d: int, aligned: bool) -> dict[str, Any]:
    return {"D": d, "BLOCK_D": block_size(d), "ALIGNED": aligned, "PRECISION": matmul_precision()}


@combine.register_fake
def _(q: Tensor, w: Tensor, log_sums: Tensor, means: Tensor, landmarks: Tensor | None, *_: Any):
    (B, h, N, d), F = q.shape, log_sums.shape[2]
    log_z = w.new_empty(0 if landmarks is None else w.shape[:3])
    return q.new_empty(B, F, N, h, d).permute(0, 3, 2, 1, 4), log_z


@torch.library.custom_op("slowfast_lara::combine_backward", mutates_args=())
def combine_backward(
    q: Tensor,
    w: Tensor,
    log_sums: Tensor,
    means: Tensor,
    landmarks: Tensor | None,
    balance: Tensor | None,
    gain: Tensor | None,
    shares: Tensor | None,
    log_z: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, w, log_sums, means, landmarks, and of balance, gain, shares as [B,h,3,C]."""
    from slowfast_lara.attention.kernels import triton_combine_backward as triton

    aligned = landmarks is not None
    q, tensors, _ = _prepare(q, w, log_sums, means, landmarks, balance, gain, shares, log_z=log_z)
    (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
    grad = with_unit_stride(grad.permute(0, 3, 2, 1, 4))  # [B,F,N,h,d]
    strides = (*q.stride()[:3], *grad.stride()[:4], d**-0.25, h, N, F, C)
    shared = _constants(d, aligned)

    sizes = tile_for("combine_backward_queries", q, d=d, C=C)
    blocks = cdiv(N, sizes["BLOCK_N"])
    query_stats = w.new_empty(B, h, N, 3 * F + 2)
    partial = w.new_empty(B, h, blocks, C if aligned else 0)
    grad_q = q.new_empty(q.shape, dtype=torch.float32 if aligned else q.dtype)
    own = (*tensors, grad, grad_q, query_stats, partial)
    kernel = triton.combine_backward_queries
    launch(kernel, B * h * blocks, q, *own, *strides, **shared, BLOCK_C=block_size(C), **sizes)
    minus_R = partial.sum(2)

    sizes = tile_for("combine_backward_samples", q, d=d, C=C)
    grad_w, grad_log_sums = torch.empty_like(tensors[1]), torch.empty_like(tensors[2])
    grad_landmarks, grad_columns = _landmark_gradients(w, aligned)
    own = (
        *tensors,
        grad,
        query_stats,
        minus_R,
        grad_w,
        grad_log_sums,
        grad_landmarks,
        grad_columns,
    )
    programs = B * h * cdiv(C, sizes["BLOCK_C"])
    kernel = triton.combine_backward_samples
    # With more than 64 frames the kernel spills registers, which only costs time.
    launch(kernel, programs, q, *own, *strides, **shared, BLOCK_F=block_size(F), **sizes)

    sizes = tile_for("combine_backward_means", q, d=d, C=C)
    grad_means = torch.empty_like(tensors[3])
    own = (*tensors[:3], *tensors[4:8], grad, query_stats, grad_means)
    programs = B * h * cdiv(F, FRAME_GROUP) * cdiv(C, sizes["BLOCK_C"])
    kernel = triton.combine_backward_means
    launch(kernel, programs, q, *own, *strides, **shared, GROUP=FRAME_GROUP, **sizes)
    if aligned:
        grad_q = query_normaliser_backward(tensors[4], q, log_z, minus_R, grad_q)
    return grad_q, grad_w, grad_log_sums, grad_means, grad_landmarks, grad_columns


def _landmark_gradients(w: Tensor, aligned: bool) -> tuple[Tensor, Tensor]:
    B, h, C, d = w.shape
    number = C if aligned else 0
    return w.new_empty(B, h, number, d), w.new_empty(B, h, 3, number)


@combine_backward.register_fake
def _(q: Tensor, w: Tensor, log_sums: Tensor, means: Tensor, landmarks: Tensor | None, *_: Any):
    grads = (x.new_empty(x.shape) for x in (q, w, log_sums, means))
    return (*grads, *_landmark_gradients(w, landmarks is not None))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # log Z has no gradient
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing recomputes it at each access
    *grads, grad_landmarks, grad_columns = torch.ops.slowfast_lara.combine_backward(*saved, grad)
    if saved[4] is None:
        return (*grads, None, None, None, None)
    return (*grads, grad_landmarks, *grad_columns.unbind(2))


combine.register_autograd(_backward, setup_context=_save)
