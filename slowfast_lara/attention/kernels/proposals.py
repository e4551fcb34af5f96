"""Operators `proposals` and `proposals_backward`: LARA's Gaussian proposals and their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import launch


@torch.library.custom_op("slowfast_lara::proposals", mutates_args=())
def proposals(
    q_landmarks: Tensor, k_landmarks: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One sample w_c of each proposal N(q~_c + k~_c, I), for float32 landmarks [B,h,C,d].

    q~ and k~ are the landmarks times d**-0.25, and p_c is the density of proposal c. w_c is
    q~_c + k~_c, plus `noise` [B,h,C,d] if it is not None.

    Returns:
        w and q~ [B,h,C,d]; log(p_c(w_c) / N(w_c;0,I)) [B,h,C]; the balance heuristic
        p_c(w_c) / sum_j p_j(w_c) [B,h,C].
    """
    noise_or_unused = q_landmarks if noise is None else noise
    out, inputs = _empty(q_landmarks), (q_landmarks, k_landmarks, noise_or_unused)
    _launch("proposals_forward", inputs, out, NOISE=noise is not None)
    return out


@proposals.register_fake
def _empty(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new = x.new_empty
    return new(x.shape), new(x.shape), new(x.shape[:3]), new(x.shape[:3])


def _launch(kernel: str, inputs: tuple[Tensor, ...], out: tuple[Tensor, ...], **flags: Any) -> None:
    B, h, C, d = inputs[0].shape
    args = (*(x.contiguous() for x in inputs), *out, d**-0.25, C)
    launch(f"proposals.{kernel}", inputs[0], *args, programs=B * h, blocks={"C": C}, d=d, **flags)


@torch.library.custom_op("slowfast_lara::proposals_backward", mutates_args=())
def proposals_backward(
    q_landmarks: Tensor, k_landmarks: Tensor, w: Tensor, log_own: Tensor, balance: Tensor,
    with_noise: bool,
    grad_w: Tensor, grad_landmarks: Tensor | None, grad_log_own: Tensor, grad_balance: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q_landmarks, k_landmarks and noise; the last is empty if not `with_noise`."""
    landmarks_or_unused = grad_w if grad_landmarks is None else grad_landmarks
    inputs = (q_landmarks, k_landmarks, w, log_own, balance)
    grads = (grad_w, landmarks_or_unused, grad_log_own, grad_balance)
    out = _empty_gradients(q_landmarks, with_noise)
    flags = {"NOISE": with_noise, "LANDMARKS": grad_landmarks is not None}
    _launch("proposals_backward", (*inputs, *grads), out, **flags)
    return out


def _empty_gradients(x: Tensor, with_noise: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape if with_noise else 0)


@proposals_backward.register_fake
def _(q_landmarks: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(q_landmarks, with_noise=more[4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q_landmarks, k_landmarks, noise = inputs
    w, _, log_own, balance = output
    ctx.with_noise = noise is not None
    ctx.set_materialize_grads(False)  # q~ has no gradient if the weighting does not use it
    ctx.save_for_backward(q_landmarks, k_landmarks, w, log_own, balance)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    grad_w, grad_landmarks, *others = grads
    grad_w, grad_log_own, grad_balance = (
        torch.zeros_like(x) if grad is None else grad
        for grad, x in zip((grad_w, *others), saved[2:])
    )
    grad_q, grad_k, grad_noise = torch.ops.slowfast_lara.proposals_backward(
        *saved, ctx.with_noise, grad_w, grad_landmarks, grad_log_own, grad_balance
    )
    return grad_q, grad_k, grad_noise if ctx.with_noise else None


proposals.register_autograd(_backward, setup_context=_save)
