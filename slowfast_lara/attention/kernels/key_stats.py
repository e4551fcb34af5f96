"""Operators `key_stats` and `key_stats_backward`: statistics of the keys per sample and frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import cdiv, launch, sum_parts, with_unit_stride
from slowfast_lara.attention.kernels.tiles import frames_of_part, queries_of_part
from slowfast_lara.attention.tensors import split_frames


@torch.library.custom_op("slowfast_lara::key_stats", mutates_args=())
def key_stats(
    w: Tensor, k: Tensor, v: Tensor | None, num_frames: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-sums L [B,h,F,C] and means M [B,h,F,C,d] of k, v [B,h,F*P,d] for samples w [B,h,C,d].

    Args:
        w: samples in the scaled space, float32; k is not scaled.
        v: values, averaged with weights xi(k, w). If None, keys are averaged with weights exp(w.k).

    Returns:
        L in float32, M in the dtype of k, the remainder that rounding removed from M (empty for
        float32), and the largest softmax weight of each sample [B,h,F,C].
    """
    tied = v is None
    k, w = with_unit_stride(k), w.contiguous()
    v = k if v is None else with_unit_stride(v)
    log_sums, means, remainder, peak = out = _empty(w, k, v, num_frames)
    args = (w, k, v, log_sums, peak, means, remainder, k.shape[2])
    _launch("key_stats_forward", args, num_frames, NORMS=not tied, VALUES=True)
    return out


def _launch(
    kernel: str,
    args: tuple[Any, ...],
    F: int,
    tile_of: str = "",
    part: int = 0,
    parts: int = 0,
    **flags: Any,
) -> None:
    """Launch a kernel with `args` (w, k, v, ...), for F frames or for parts of `part` queries.

    A program owns a block of samples, and a frame or one of `parts` parts of the frames; in
    key_stats_backward_keys, a frame and a block of keys.
    """
    w, k, v = args[:3]
    (B, h, N, d), C = k.shape, w.shape[2]
    P = part or N // F
    launch(
        f"key_stats.{kernel}",
        k,
        *(*args, *k.stride()[:3], *v.stride()[:3], d**-0.25, h, F, P, C),
        programs=B * h * (parts or cdiv(N, P)),
        blocks={"N": P} if kernel == "key_stats_backward_keys" else {"C": C},
        tile_of=tile_of,
        d=d,
        C=C,
        **flags,
    )


@key_stats.register_fake
def _empty(w: Tensor, k: Tensor, v: Tensor | None, num_frames: int):
    split_frames(k, num_frames)  # raises an error if num_frames does not divide the token count
    B, h, C, d = w.shape
    log_sums = w.new_empty(B, h, num_frames, C)
    means = k.new_empty(B, h, num_frames, C, d)
    remainder = means.new_empty(0 if k.dtype == torch.float32 else means.shape)
    return log_sums, means, remainder, torch.empty_like(log_sums)


@torch.library.custom_op("slowfast_lara::key_stats_backward", mutates_args=())
def key_stats_backward(
    w: Tensor, k: Tensor, v: Tensor | None, num_frames: int,
    log_sums: Tensor, means: Tensor, remainder: Tensor, peak: Tensor,
    grad_log_sums: Tensor, grad_means: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of w, k and v; the gradient of v is empty if v is None."""
    tied = v is None
    k, w = with_unit_stride(k), w.contiguous()
    v = k if v is None else with_unit_stride(v)
    grads = (grad_log_sums.contiguous(), grad_means.contiguous())
    tensors = (w, k, v, log_sums, peak, means, remainder, *grads)
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(0 if tied else v.shape)
    kernel, tile_of = "key_stats_backward_keys", "key_stats_backward_tied" if tied else ""
    flags: dict[str, Any] = {"NORMS": not tied, "VALUES": True, "TIED": tied}
    _launch(kernel, (*tensors, grad_k, grad_v), num_frames, tile_of, **flags)
    (B, h, C, d), kernel = w.shape, "key_stats_backward_samples"
    frames = frames_of_part(kernel, num_frames, B * h, element_size=k.element_size(), d=d, C=C)
    parts = cdiv(num_frames, frames)
    partial = w.new_empty(B, h, parts, C, d)
    _launch(kernel, (*tensors, partial, frames), num_frames, parts=parts, NORMS=not tied)
    return sum_parts(partial), grad_k, grad_v


@key_stats_backward.register_fake
def _(w: Tensor, k: Tensor, v: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_v = k.new_empty(0 if v is None else v.shape)
    return w.new_empty(w.shape), k.new_empty(k.shape), grad_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    w, k, v, ctx.num_frames = inputs
    ctx.set_materialize_grads(False)  # `remainder` and `peak` have no gradient
    ctx.save_for_backward(w, k, v, *output)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    w, k, v, *stats = ctx.saved_tensors
    grads = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads[:2], stats))
    grad_w, grad_k, grad_v = torch.ops.slowfast_lara.key_stats_backward(
        w, k, v, ctx.num_frames, *stats, *grads
    )
    return grad_w, grad_k, None if v is None else grad_v, None


key_stats.register_autograd(_backward, setup_context=_save)


def query_normaliser(landmarks: Tensor, q: Tensor) -> Tensor:
    """Log-normalisers log Z_c = log sum_n exp(q_n.q~_c), [B,h,C], with q_n in the scaled space.

    `landmarks` (q~) are in the scaled space, `q` is not: the kernel scales it.
    """
    (B, h, N, d), C, tile_of = q.shape, landmarks.shape[2], "query_normaliser"
    part = queries_of_part(tile_of, N, B * h, element_size=q.element_size(), d=d, C=C)
    partial = landmarks.new_empty(B, h, cdiv(N, part), C)
    args = (landmarks, q, q, partial, partial, q, q, N)
    _launch("key_stats_forward", args, 1, tile_of, part, NORMS=False, VALUES=False)
    # logcumsumexp is one launch; logsumexp is nine.
    sums = partial if partial.shape[2] == 1 else partial.logcumsumexp(2)
    return sums[:, :, -1].contiguous()


def query_normaliser_backward(
    landmarks: Tensor, q: Tensor, log_z: Tensor, grad_log_z: Tensor, grad_q: Tensor
) -> Tensor:
    """grad_q (float32) plus the gradient of q through `query_normaliser`, in the dtype of q."""
    out = q.new_empty(q.shape)
    tensors = (landmarks, q, q, log_z, log_z, q, q, grad_log_z, q, out, grad_q)
    kernel, tile_of = "key_stats_backward_keys", "query_normaliser_backward"
    _launch(kernel, tensors, 1, tile_of, NORMS=False, VALUES=False, TIED=False)
    return out
