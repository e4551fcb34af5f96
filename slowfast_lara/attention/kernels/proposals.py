"""The operators `proposals` and `proposals_backward`: LARA's Gaussians and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import cdiv, power_of_two, precision, run, tile_for


@torch.library.custom_op("slowfast_lara::proposals", mutates_args=())
def proposals(
    q_landmarks: Tensor, k_landmarks: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One sample w_c [B,h,C,d] of each N(q~_c + k~_c, I), q~, and two numbers of each [B,h,C].

    They are log(q_c(w_c) / N(w_c;0,I)) and the share of q_c(w_c) in sum_c' q_c'(w_c). Landmarks
    [B,h,C,d] are float32; w and q~ are in the scaled space, and so is the noise.
    """
    from slowfast_lara.attention.kernels.triton_proposals import proposals_forward

    given = [x.contiguous() for x in (q_landmarks, k_landmarks)]
    noise_or_any = given[0] if noise is None else noise.contiguous()
    out = _empty(q_landmarks)
    tensors = (*given, noise_or_any, *out)
    _run("forward", proposals_forward, tensors, NOISE=noise is not None)
    return out


def _empty(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = x.new_empty
    return new(x.shape), new(x.shape), new(x.shape[:3]), new(x.shape[:3])


def _run(way: str, kernel: Any, tensors: tuple[Tensor, ...], **flags: bool) -> None:
    (B, h, C, d), like = tensors[0].shape, tensors[0]
    sizes = tile_for(f"proposals_{way}", like)
    shared = {"D": d, "BLOCK_D": power_of_two(d), "PRECISION": precision(), **sizes}
    programs = B * h * cdiv(C, sizes["BLOCK_C"])
    run(kernel, programs, like, *tensors, d**-0.25, C, **shared, **flags)


@proposals.register_fake
def _(q_landmarks: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(q_landmarks)


@torch.library.custom_op("slowfast_lara::proposals_backward", mutates_args=())
def proposals_backward(
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    points: Tensor,
    own: Tensor,
    balance: Tensor,
    with_noise: bool,
    grad_points: Tensor,
    grad_landmarks: Tensor | None,
    grad_own: Tensor,
    grad_balance: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of both landmarks, and of the noise (empty without it)."""
    from slowfast_lara.attention.kernels import triton_proposals

    given = (q_landmarks, k_landmarks, points, own, balance)
    landmarks_or_any = grad_points if grad_landmarks is None else grad_landmarks
    grads = (grad_points, landmarks_or_any, grad_own, grad_balance)
    out = _empty_gradients(q_landmarks, with_noise)
    tensors = (*(x.contiguous() for x in (*given, *grads)), *out)
    flags = {"NOISE": with_noise, "LANDMARKS": grad_landmarks is not None}
    _run("backward", triton_proposals.proposals_backward, tensors, **flags)
    return out


def _empty_gradients(x: Tensor, with_noise: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape if with_noise else 0)


@proposals_backward.register_fake
def _(q_landmarks: Tensor, k: Tensor, points: Tensor, own: Tensor, balance: Tensor, *more: Any):
    return _empty_gradients(q_landmarks, more[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q_landmarks, k_landmarks, noise = inputs
    points, _, own, balance = output
    ctx.with_noise = noise is not None
    ctx.set_materialize_grads(False)  # q~ is not used by all weightings
    ctx.save_for_backward(q_landmarks, k_landmarks, points, own, balance)


def _backward(
    ctx: Any,
    grad_points: Tensor | None,
    grad_landmarks: Tensor | None,
    grad_own: Tensor | None,
    grad_balance: Tensor | None,
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    grad_points, grad_own, grad_balance = (
        torch.zeros_like(x) if grad is None else grad
        for grad, x in zip((grad_points, grad_own, grad_balance), saved[2:])
    )
    grads = (grad_points, grad_landmarks, grad_own, grad_balance)
    grad_q, grad_k, grad_noise = torch.ops.slowfast_lara.proposals_backward(
        *saved, ctx.with_noise, *grads
    )
    return grad_q, grad_k, grad_noise if ctx.with_noise else None


proposals.register_autograd(_backward, setup_context=_keep)
