"""The operators `mix` and `mix_backward`: the estimate from what the samples saw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.key_stats import add_column_gradient, column_sums
from slowfast_lara.attention.kernels.launch import (
    cdiv,
    power_of_two,
    precision,
    rows_in_place,
    run,
    tile_for,
)
from slowfast_lara.attention.kernels.tiles import FRAME_GROUP


@torch.library.custom_op("slowfast_lara::mix", mutates_args=())
def mix(
    q: Tensor,
    samples: Tensor,
    log_sums: Tensor,
    means: Tensor,
    landmarks: Tensor | None,
    base: Tensor | None,
    gain: Tensor | None,
    share: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The estimate [B,h,N,F,d] for q [B,h,N,d], with what samples [B,h,C,d] saw of the frames.

    Log-sums are [B,h,F,C], means [B,h,F,C,d]. Landmarks [B,h,C,d] and three numbers of each
    [B,h,C] make the weights of triton_mix.py, all or none; the second result is the landmarks'
    log-sums over the queries. All but q and means are float32, samples and landmarks in the
    scaled space.
    """
    from slowfast_lara.attention.kernels.triton_combine import mix_forward

    q, given, sums = _prepared(q, samples, log_sums, means, landmarks, base, gain, share)
    (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
    out = q.new_empty(B, F, N, h, d)
    sizes = tile_for("mix_forward", q, d=d, C=C)
    run(
        mix_forward,
        B * h * cdiv(N, sizes["BLOCK_N"]),
        q,
        *(*given, out),
        *(*q.stride()[:3], d**-0.25, h, N, F, C),
        **_constants(d, landmarks is not None),
        BLOCK_C=power_of_two(C),
        **sizes,
    )
    # The layout that the temporal stage of trajectory attention reads.
    return out.permute(0, 3, 2, 1, 4), sums


def _prepared(
    q: Tensor,
    samples: Tensor,
    log_sums: Tensor,
    means: Tensor,
    landmarks: Tensor | None,
    *numbers: Tensor | None,
    sums: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """q, the tensors that every kernel of the mixing step is given, and the column sums."""
    q, samples = rows_in_place(q), samples.contiguous()
    given = (q, samples, log_sums.contiguous(), means.contiguous())
    if landmarks is None:
        # A kernel without landmarks reads none of these.
        return q, (*given, *[samples] * 5), samples.new_empty(0)
    landmarks = landmarks.contiguous()
    if sums is None:
        sums = column_sums(landmarks, q)
    small = [x.contiguous() for x in numbers if x is not None]
    return q, (*given, landmarks, sums, *small), sums


def _constants(d: int, favoured: bool) -> dict[str, Any]:
    return {"D": d, "BLOCK_D": power_of_two(d), "FAVOURED": favoured, "PRECISION": precision()}


@mix.register_fake
def _(
    q: Tensor, samples: Tensor, log_sums: Tensor, means: Tensor, landmarks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    (B, h, N, d), F = q.shape, log_sums.shape[2]
    sums = samples.new_empty(0 if landmarks is None else samples.shape[:3])
    return q.new_empty(B, F, N, h, d).permute(0, 3, 2, 1, 4), sums


@torch.library.custom_op("slowfast_lara::mix_backward", mutates_args=())
def mix_backward(
    q: Tensor,
    samples: Tensor,
    log_sums: Tensor,
    means: Tensor,
    landmarks: Tensor | None,
    base: Tensor | None,
    gain: Tensor | None,
    share: Tensor | None,
    sums: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, samples, log-sums, means, landmarks, and of the three numbers [B,h,3,C]."""
    from slowfast_lara.attention.kernels import triton_combine_backward as triton_mix_backward

    favoured = landmarks is not None
    q, given, _ = _prepared(q, samples, log_sums, means, landmarks, base, gain, share, sums=sums)
    (B, h, N, d), (F, C) = q.shape, log_sums.shape[2:]
    grad = rows_in_place(grad.permute(0, 3, 2, 1, 4))  # [B,F,N,h,d]
    strides = (*q.stride()[:3], *grad.stride()[:4], d**-0.25, h, N, F, C)
    shared = _constants(d, favoured)

    sizes = tile_for("mix_backward_queries", q, d=d, C=C)
    blocks = cdiv(N, sizes["BLOCK_N"])
    rows = samples.new_empty(B, h, N, 3 * F + 2)
    parts = samples.new_empty(B, h, blocks, C if favoured else 0)
    grad_q = q.new_empty(q.shape, dtype=torch.float32 if favoured else q.dtype)
    own = (*given, grad, grad_q, rows, parts)
    kernel = triton_mix_backward.mix_backward_queries
    run(kernel, B * h * blocks, q, *own, *strides, **shared, BLOCK_C=power_of_two(C), **sizes)
    pull = parts.sum(2)

    sizes = tile_for("mix_backward_samples", q, d=d, C=C)
    grad_samples, grad_log_sums = torch.empty_like(given[1]), torch.empty_like(given[2])
    grad_landmarks, grad_numbers = _landmark_gradients(samples, favoured)
    own = (*given, grad, rows, pull, grad_samples, grad_log_sums, grad_landmarks, grad_numbers)
    programs = B * h * cdiv(C, sizes["BLOCK_C"])
    kernel = triton_mix_backward.mix_backward_samples
    # Of more than 64 frames some registers spill, which takes time and no more.
    run(kernel, programs, q, *own, *strides, **shared, BLOCK_F=power_of_two(F), **sizes)

    sizes = tile_for("mix_backward_means", q, d=d, C=C)
    grad_means = torch.empty_like(given[3])
    own = (*given[:3], *given[4:8], grad, rows, grad_means)
    programs = B * h * cdiv(F, FRAME_GROUP) * cdiv(C, sizes["BLOCK_C"])
    kernel = triton_mix_backward.mix_backward_means
    run(kernel, programs, q, *own, *strides, **shared, GROUP=FRAME_GROUP, **sizes)
    if favoured:
        grad_q = add_column_gradient(given[4], q, sums, pull, grad_q)
    return grad_q, grad_samples, grad_log_sums, grad_means, grad_landmarks, grad_numbers


def _landmark_gradients(samples: Tensor, favoured: bool) -> tuple[Tensor, Tensor]:
    B, h, C, d = samples.shape
    number = C if favoured else 0
    return samples.new_empty(B, h, number, d), samples.new_empty(B, h, 3, number)


@mix_backward.register_fake
def _(
    q: Tensor, samples: Tensor, log_sums: Tensor, means: Tensor, landmarks: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    like = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, samples, log_sums, means)
    ]
    return (*like, *_landmark_gradients(samples, landmarks is not None))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # the column sums have none
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: where blocks are checkpointed, it makes them anew
    *grads, grad_landmarks, grad_numbers = torch.ops.slowfast_lara.mix_backward(*saved, grad)
    if saved[4] is None:
        return (*grads, None, None, None, None)
    return (*grads, grad_landmarks, *grad_numbers.unbind(2))


mix.register_autograd(_backward, setup_context=_keep)
