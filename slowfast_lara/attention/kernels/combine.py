"""Operators `combine`, which computes attention from the key statistics, and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.key_stats import query_normaliser, query_normaliser_backward
from slowfast_lara.attention.kernels.launch import cdiv, launch, sum_parts, with_unit_stride
from slowfast_lara.attention.kernels.tiles import FRAME_GROUP, block_size, queries_of_part, tile


@torch.library.custom_op("slowfast_lara::combine", mutates_args=())
def combine(
    q: Tensor, w: Tensor, log_sums: Tensor, means: Tensor,
    landmarks: Tensor | None, balance: Tensor | None, gain: Tensor | None, shares: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Importance-sampling estimate [B,h,N,F,d] for queries q [B,h,N,d] and samples w [B,h,C,d].

    Args:
        q: queries, not scaled; samples and landmarks are in the scaled space.
        log_sums: L [B,h,F,C], plus the samples' log-weights.
        means: M [B,h,F,C,d], in the dtype of q. All tensors except q and M are float32.
        landmarks, balance, gain, shares: terms of alpha (samples.py), or all None.

    Returns:
        The estimate, and the log-normalisers log Z [B,h,C] of the alignment scores (empty without
        landmarks).
    """
    q, *tensors = _contiguous(q, w, log_sums, means, landmarks, balance, gain, shares)
    log_z = w.new_empty(0) if landmarks is None else query_normaliser(tensors[3], q)
    tensors.insert(4, log_z)
    (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
    out = q.new_empty(B, F, N, h, d)
    launch(
        "combine.combine_forward",
        q,
        *(q, *tensors, out, *q.stride()[:3], d**-0.25, h, N, F, C),
        programs=B * h,
        blocks={"N": N},
        d=d,
        C=C,
        ALIGNED=landmarks is not None,
    )
    # [B,F,N,h,d] is the memory layout that the temporal stage of trajectory attention reads.
    return out.permute(0, 3, 2, 1, 4), log_z


def _contiguous(q: Tensor, w: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Make tensors contiguous (q: only the last dimension); replace None by the placeholder w."""
    return [with_unit_stride(q), *((w if x is None else x).contiguous() for x in (w, *others))]


@combine.register_fake
def _(q: Tensor, w: Tensor, log_sums: Tensor, means: Tensor, landmarks: Tensor | None, *_: Any):
    (B, h, N, d), F = q.shape, log_sums.shape[2]
    log_z = w.new_empty(0 if landmarks is None else w.shape[:3])
    return q.new_empty(B, F, N, h, d).permute(0, 3, 2, 1, 4), log_z


@torch.library.custom_op("slowfast_lara::combine_backward", mutates_args=())
def combine_backward(
    q: Tensor, w: Tensor, log_sums: Tensor, means: Tensor,
    landmarks: Tensor | None, balance: Tensor | None, gain: Tensor | None, shares: Tensor | None,
    log_z: Tensor, grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the inputs of `combine`, in order; one [B,h,3,C] for balance, gain, shares."""
    aligned = landmarks is not None
    tensors = _contiguous(q, w, log_sums, means, landmarks, log_z, balance, gain, shares)
    q, w, log_sums, means = tensors[:4]
    (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
    grad = with_unit_stride(grad.permute(0, 3, 2, 1, 4))  # [B,F,N,h,d]
    sizes = (*q.stride()[:3], *grad.stride()[:4], d**-0.25, h, N, F, C)
    shared: dict[str, Any] = {"d": d, "C": C, "ALIGNED": aligned}

    kernel = "combine_backward_queries"
    blocks = cdiv(N, tile(kernel, element_size=q.element_size(), d=d, C=C)["BLOCK_N"])
    query_stats = w.new_empty(B, h, N, 3 * F + 2)
    partial = w.new_empty(B, h, blocks, C if aligned else 0)
    grad_q = q.new_empty(q.shape, dtype=torch.float32 if aligned else q.dtype)
    launch(
        f"combine.{kernel}",
        q,
        *(*tensors, grad, grad_q, query_stats, partial, *sizes),
        programs=B * h * blocks,
        **shared,
    )
    minus_R = partial.sum(2)
    kernel = "combine_backward_samples"
    part = queries_of_part(kernel, N, B * h, element_size=q.element_size(), d=d, C=C)
    parts = cdiv(N, part)
    partial_grads = (
        w.new_empty(B, h, parts, C, d),
        w.new_empty(B, h, parts, F, C),
        *_empty_landmark_gradients(w, aligned, parts),
    )
    launch(
        f"combine.{kernel}",
        q,
        *(*tensors, grad, query_stats, minus_R, *partial_grads, *sizes, part),
        programs=B * h * parts,
        blocks={"C": C},
        BLOCK_F=block_size(F),  # above 64 frames the kernel spills registers, which only costs time
        **shared,
    )
    grad_w, grad_log_sums, grad_landmarks, grad_columns = map(sum_parts, partial_grads)
    grad_means = torch.empty_like(means)
    launch(
        "combine.combine_backward_means",
        q,
        *(*tensors[:3], *tensors[4:8], grad, query_stats, grad_means, *sizes),
        programs=B * h * cdiv(F, FRAME_GROUP),
        blocks={"C": C},
        GROUP=FRAME_GROUP,
        **shared,
    )
    if aligned:
        grad_q = query_normaliser_backward(tensors[4], q, log_z, minus_R, grad_q)
    return grad_q, grad_w, grad_log_sums, grad_means, grad_landmarks, grad_columns


def _empty_landmark_gradients(w: Tensor, aligned: bool, *parts: int) -> tuple[Tensor, Tensor]:
    B, h, C, d = w.shape
    number = C if aligned else 0
    return w.new_empty(B, h, *parts, number, d), w.new_empty(B, h, *parts, 3, number)


@combine_backward.register_fake
def _(q: Tensor, w: Tensor, log_sums: Tensor, means: Tensor, landmarks: Tensor | None, *_: Any):
    grads = (x.new_empty(x.shape) for x in (q, w, log_sums, means))
    return (*grads, *_empty_landmark_gradients(w, landmarks is not None))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # the output log Z has no gradient
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    # Read saved_tensors once: with activation checkpointing, each access recomputes them.
    saved = ctx.saved_tensors
    *grads, grad_landmarks, grad_columns = torch.ops.slowfast_lara.combine_backward(*saved, grad)
    if saved[4] is None:
        return (*grads, None, None, None, None)
    return (*grads, grad_landmarks, *grad_columns.unbind(2))


combine.register_autograd(_backward, setup_context=_save)
