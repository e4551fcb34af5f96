"""Operators `landmarks` and `landmarks_backward`: one vector per segment of the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.launch import launch, with_unit_stride
from slowfast_lara.attention.landmarks import GLOBAL_MEAN_SHARE, check_landmarks
from slowfast_lara.attention.tensors import split_frames


@torch.library.custom_op("slowfast_lara::landmarks", mutates_args=())
def landmarks(x: Tensor, number: int, num_frames: int, farthest: bool) -> tuple[Tensor, Tensor]:
    """`segment_means` or `farthest_tokens` of x [B,h,F*P,d]: [B,h,C,d] in float32.

    The second result holds the space-major indices of the farthest tokens; it is empty for means.
    """
    x = with_unit_stride(x)
    (B, h, _, d), (out, chosen) = x.shape, _empty(x, number, num_frames, farthest)
    strides, sizes = x.stride()[:3], (h, *_sizes(x, number, num_frames))
    sums = torch.empty_like(out) if farthest else out
    args, grid = (x, sums, *strides, *sizes), B * h * number
    launch("landmarks.segment_sums", x, *args, programs=grid, d=d, MEANS=not farthest)
    if farthest:
        args = (x, sums, sums.mean(2), out, chosen, *strides, GLOBAL_MEAN_SHARE, *sizes)
        launch("landmarks.farthest_of_segment", x, *args, programs=grid, d=d)
    return out, chosen


@landmarks.register_fake
def _empty(x: Tensor, number: int, num_frames: int, farthest: bool) -> tuple[Tensor, Tensor]:
    check_landmarks(number, x.shape[2])
    split_frames(x, num_frames)  # raises an error if num_frames does not divide the token count
    B, h, _, d = x.shape
    out = x.new_empty(B, h, number, d, dtype=torch.float32)
    return out, x.new_empty(B, h, number if farthest else 0, dtype=torch.int32)


def _sizes(x: Tensor, number: int, num_frames: int) -> tuple[int, ...]:
    """F, P, C, the number of shorter segments, and the length of these segments."""
    tokens = x.shape[2]
    length = tokens // number
    return num_frames, tokens // num_frames, number, (length + 1) * number - tokens, length


@torch.library.custom_op("slowfast_lara::landmarks_backward", mutates_args=())
def landmarks_backward(x: Tensor, chosen: Tensor, num_frames: int, grad: Tensor) -> Tensor:
    """Gradient of x; only the shape, dtype and device of x are used, not its values."""
    (B, h, _, d), number, out = x.shape, grad.shape[2], x.new_empty(x.shape)
    args = (grad.contiguous(), chosen, out, *_sizes(x, number, num_frames))
    means = chosen.numel() == 0
    launch("landmarks.segment_backward", x, *args, programs=B * h * number, d=d, MEANS=means)
    return out


@landmarks_backward.register_fake
def _(x: Tensor, chosen: Tensor, num_frames: int, grad: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, ctx.num_frames, _ = inputs
    ctx.set_materialize_grads(False)  # the indices have no gradient
    ctx.save_for_backward(x, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None
    x, chosen = ctx.saved_tensors
    grad_x = torch.ops.slowfast_lara.landmarks_backward(x, chosen, ctx.num_frames, grad)
    return grad_x, None, None, None


landmarks.register_autograd(_backward, setup_context=_save)
