"""The operators `seen` and `seen_backward`: what each sample sees of each frame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.frames import split_frames
from slowfast_lara.attention.kernels.launch import (
    cdiv,
    power_of_two,
    precision,
    rows_in_place,
    run,
    tile_for,
)


@torch.library.custom_op("slowfast_lara::seen", mutates_args=())
def seen(
    samples: Tensor, k: Tensor, v: Tensor | None, num_frames: int, norms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-sums [B,h,F,C] and means [B,h,F,C,d] of k, v [B,h,F*P,d] for samples [B,h,C,d].

    Without v, the keys are the values, too.

    Log-sums are float32, means as k; the third result is what rounding took from the means, the
    fourth each sample's largest share [B,h,F,C].
    `norms`: of xi(k, w), with the norms of the keys; else of exp(w.k). Samples are float32, in
    the scaled space; k is not scaled.
    """
    from slowfast_lara.attention.kernels.triton_key_stats import seen_forward

    k, samples = rows_in_place(k), samples.contiguous()
    v = k if v is None else rows_in_place(v)
    (B, h, C, d) = samples.shape
    log_sums, means, rest, largest = _empty(samples, k, num_frames)
    sizes = tile_for("seen_forward", k, d=d, C=C)
    run(
        seen_forward,
        B * h * num_frames * cdiv(C, sizes["BLOCK_C"]),
        k,
        *(samples, k, v, log_sums, largest, means, rest),
        *_sizes(k, v, num_frames, C),
        **_constants(d, norms),
        VALUES=True,
        **sizes,
    )
    return log_sums, means, rest, largest


def _empty(samples: Tensor, k: Tensor, num_frames: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    split_frames(k, num_frames)  # refuses what cannot be split
    B, h, C, d = samples.shape
    log_sums = samples.new_empty(B, h, num_frames, C)
    means = k.new_empty(B, h, num_frames, C, d)
    rest = means.new_empty(0 if k.dtype == torch.float32 else means.shape)
    return log_sums, means, rest, torch.empty_like(log_sums)


def _sizes(k: Tensor, v: Tensor, num_frames: int, C: int) -> tuple[Any, ...]:
    _, h, keys, d = k.shape
    return (*k.stride()[:3], *v.stride()[:3], d**-0.25, h, num_frames, keys // num_frames, C)


def _constants(d: int, norms: bool) -> dict[str, Any]:
    return {"D": d, "BLOCK_D": power_of_two(d), "NORMS": norms, "PRECISION": precision()}


@seen.register_fake
def _(
    samples: Tensor, k: Tensor, v: Tensor | None, num_frames: int, norms: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(samples, k, num_frames)


@torch.library.custom_op("slowfast_lara::seen_backward", mutates_args=())
def seen_backward(
    samples: Tensor,
    k: Tensor,
    v: Tensor | None,
    num_frames: int,
    norms: bool,
    log_sums: Tensor,
    means: Tensor,
    rest: Tensor,
    largest: Tensor,
    grad_log_sums: Tensor,
    grad_means: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of samples, k and v (empty without it)."""
    from slowfast_lara.attention.kernels import triton_key_stats as triton_seen

    with_values = v is not None
    k, samples = rows_in_place(k), samples.contiguous()
    v = k if v is None else rows_in_place(v)
    (B, h, keys, d), C = k.shape, samples.shape[2]
    grads = (grad_log_sums.contiguous(), grad_means.contiguous())
    given = (samples, k, v, log_sums, largest, means, rest, *grads)
    grad_samples, grad_k = torch.empty_like(samples), k.new_empty(k.shape)
    grad_v = v.new_empty(v.shape if with_values else 0)
    shared = _constants(d, norms)
    sizes = tile_for("seen_backward_keys" if with_values else "seen_backward_same", k, d=d, C=C)
    run(
        triton_seen.seen_backward_keys,
        B * h * num_frames * cdiv(keys // num_frames, sizes["BLOCK_N"]),
        k,
        *(*given, grad_k, grad_v),
        *_sizes(k, v, num_frames, C),
        **shared,
        VALUES=True,
        SAME=not with_values,
        **sizes,
    )
    sizes = tile_for("seen_backward_samples", k, d=d, C=C)
    run(
        triton_seen.seen_backward_samples,
        B * h * cdiv(C, sizes["BLOCK_C"]),
        k,
        *(*given, grad_samples),
        *_sizes(k, v, num_frames, C),
        **shared,
        **sizes,
    )
    return grad_samples, grad_k, grad_v


@seen_backward.register_fake
def _(samples: Tensor, k: Tensor, v: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    new = samples.new_empty(samples.shape), k.new_empty(k.shape)
    return *new, k.new_empty(0 if v is None else v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    samples, k, v, ctx.num_frames, ctx.norms = inputs
    ctx.set_materialize_grads(False)  # the last two have none
    ctx.save_for_backward(samples, k, v, *output)


def _backward(
    ctx: Any, grad_log_sums: Tensor | None, grad_means: Tensor | None, *_: None
) -> tuple[Any, ...]:
    samples, k, v, *seen_before = ctx.saved_tensors
    if grad_log_sums is None:
        grad_log_sums = torch.zeros_like(seen_before[0])
    if grad_means is None:
        grad_means = torch.zeros_like(seen_before[1])
    grads = torch.ops.slowfast_lara.seen_backward(
        samples, k, v, ctx.num_frames, ctx.norms, *seen_before, grad_log_sums, grad_means
    )
    grad_samples, grad_k, grad_v = grads
    return grad_samples, grad_k, None if v is None else grad_v, None, None


seen.register_autograd(_backward, setup_context=_keep)


def column_sums(landmarks: Tensor, q: Tensor) -> Tensor:
    """log sum_n exp(q_n.q~_c), [B,h,C]: landmarks in the scaled space, q not."""
    from slowfast_lara.attention.kernels.triton_key_stats import seen_forward

    (B, h, _, d), C = q.shape, landmarks.shape[2]
    out = landmarks.new_empty(B, h, C)
    sizes = tile_for("column_sums", q, d=d, C=C)
    run(
        seen_forward,
        B * h * cdiv(C, sizes["BLOCK_C"]),
        q,
        *(landmarks, q, q, out, out, q, q),
        *_sizes(q, q, 1, C),
        **_constants(d, norms=False),
        VALUES=False,
        **sizes,
    )
    return out


def add_column_gradient(
    landmarks: Tensor, q: Tensor, sums: Tensor, grad_sums: Tensor, grad_q: Tensor
) -> Tensor:
    """grad_q (float32) and what q's share in `column_sums` adds to it, as q."""
    from slowfast_lara.attention.kernels.triton_key_stats import seen_backward_keys

    (B, h, N, d), C = q.shape, landmarks.shape[2]
    out = q.new_empty(q.shape)
    sizes = tile_for("column_gradient", q, d=d, C=C)
    run(
        seen_backward_keys,
        B * h * cdiv(N, sizes["BLOCK_N"]),
        q,
        *(landmarks, q, q, sums, sums, q, q, grad_sums, q, out, grad_q),
        *_sizes(q, q, 1, C),
        **_constants(d, norms=False),
        VALUES=False,
        SAME=False,
        **sizes,
    )
    return out
