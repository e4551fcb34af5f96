"""The operators `landmarks` and `landmarks_backward`: one token for each segment of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slowfast_lara.attention.frames import split_frames
from slowfast_lara.attention.kernels.launch import power_of_two, rows_in_place, run, tile_for
from slowfast_lara.attention.landmarks import TOWARDS_ALL, check_landmarks


@torch.library.custom_op("slowfast_lara::landmarks", mutates_args=())
def landmarks(x: Tensor, number: int, num_frames: int, farthest: bool) -> tuple[Tensor, Tensor]:
    """landmarks.segment_means or farthest_tokens of x [B,h,F*P,d]: [B,h,C,d] float32.

    The second result tells which tokens are the farthest, counted space-major, or nothing.
    """
    from slowfast_lara.attention.kernels import triton_landmarks

    x = rows_in_place(x)
    (B, h, _, _), (out, chosen) = x.shape, _empty(x, number, num_frames, farthest)
    sizes = _sizes(x, number, num_frames)
    of_x, constants = (*x.stride()[:3], h), _constants("segment_sums", x)
    sums = torch.empty_like(out) if farthest else out
    kernel = triton_landmarks.segment_sums
    run(kernel, B * h * number, x, x, sums, *of_x, *sizes, **constants, MEANS=not farthest)
    if farthest:
        given = (x, sums, sums.mean(2), out, chosen, *of_x[:3], TOWARDS_ALL, h)
        kernel = triton_landmarks.farthest_of_segment
        constants = _constants("farthest_of_segment", x)
        run(kernel, B * h * number, x, *given, *sizes, **constants)
    return out, chosen


def _empty(x: Tensor, number: int, num_frames: int, farthest: bool) -> tuple[Tensor, Tensor]:
    check_landmarks(number, x.shape[2])
    split_frames(x, num_frames)  # refuses what cannot be split
    B, h, _, d = x.shape
    out = x.new_empty(B, h, number, d, dtype=torch.float32)
    return out, x.new_empty(B, h, number if farthest else 0, dtype=torch.int32)


def _sizes(x: Tensor, number: int, num_frames: int) -> tuple[int, ...]:
    """F, P, C, and how many segments have the shorter length, which is the last."""
    tokens = x.shape[2]
    length = tokens // number
    return num_frames, tokens // num_frames, number, (length + 1) * number - tokens, length


def _constants(kernel: str, x: Tensor) -> dict[str, int]:
    d = x.shape[3]
    return {"D": d, "BLOCK_D": power_of_two(d), **tile_for(kernel, x)}


@landmarks.register_fake
def _(x: Tensor, number: int, num_frames: int, farthest: bool) -> tuple[Tensor, Tensor]:
    return _empty(x, number, num_frames, farthest)


@torch.library.custom_op("slowfast_lara::landmarks_backward", mutates_args=())
def landmarks_backward(x: Tensor, chosen: Tensor, num_frames: int, grad: Tensor) -> Tensor:
    """The gradient of x, whose values do not matter."""
    from slowfast_lara.attention.kernels.triton_landmarks import spread_over_segments

    out, grad, number = x.new_empty(x.shape), grad.contiguous(), grad.shape[2]
    run(
        spread_over_segments,
        x.shape[0] * x.shape[1] * number,
        x,
        *(grad, chosen, out, *_sizes(x, number, num_frames)),
        **_constants("spread_over_segments", x),
        MEANS=chosen.numel() == 0,
    )
    return out


@landmarks_backward.register_fake
def _(x: Tensor, chosen: Tensor, num_frames: int, grad: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, ctx.num_frames, _ = inputs
    ctx.set_materialize_grads(False)  # the numbers of tokens have none
    ctx.save_for_backward(x, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None
    x, chosen = ctx.saved_tensors
    grad_x = torch.ops.slowfast_lara.landmarks_backward(x, chosen, ctx.num_frames, grad)
    return grad_x, None, None, None


landmarks.register_autograd(_backward, setup_context=_keep)
