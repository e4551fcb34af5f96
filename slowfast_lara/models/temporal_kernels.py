"""The temporal stage's Triton kernels as operators of torch, with their tiles and traffic.

`temporal_stage` and `temporal_stage_backward` are operators with a fake (shapes without a
device: compile, the meta device, FakeTensorMode) and an autograd formula. The kernels and
the mathematics are in attention/kernels/temporal.py.

Shapes: B batch, N queries of a clip, T = B*N, h heads, F frames, d head size, D = h*d.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.temporal import (
    backward_queries_kernel,
    backward_tokens_kernel,
    backward_weight_kernel,
    forward_kernel,
)
from slowfast_lara.models.temporal import bias_gradient

# Sums over tokens are made in so many parts, so that there is work for a whole GPU.
PARTS = 8


class Tile(NamedTuple):
    """Heads, tokens and columns of a block, and the warps of a program."""

    heads: int
    tokens: int
    columns: int
    warps: int


def tile_of(kernel: Any, d: int, h: int, F: int, item_size: int, project_values: bool) -> Tile:
    """Fixed, so that a run repeats: no spills in half precision on sm_80, sm_90 and sm_100."""
    half = item_size == 2
    if kernel is backward_tokens_kernel:  # all heads at once
        heads = _block(h)
        return Tile(heads, 16, 32 if half and heads == 16 else 16, 8 if half else 16)
    if kernel is backward_weight_kernel:
        return Tile(4, 32, 32 if half or d <= 64 else 16, 4)
    if half and d <= 64 and F <= 16:
        return Tile(4, 16, 64, 4) if project_values else Tile(4, 32, 32, 4)
    return Tile(4, 16, 32 if half or d <= 64 else 16, 4)


class _Launcher:
    """What all kernels of one call are told."""

    def __init__(self, q: Tensor, x: Tensor, project_values: bool) -> None:
        self.B, self.N, self.h, self.d = q.shape
        self.T, self.F, self.D = self.B * self.N, x.shape[1], self.h * self.d
        self.item_size, self.project_values = x.element_size(), project_values
        # float32 products in TF32 where torch is told so, else in three of them.
        exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        self.precision = "tf32x3" if exact else "tf32"

    def tile(self, kernel: Any) -> Tile:
        return tile_of(kernel, self.d, self.h, self.F, self.item_size, self.project_values)

    def __call__(
        self, kernel: Any, programs: int, *args: Any, scale: float, **constants: Any
    ) -> None:
        tile = self.tile(kernel)
        known = {
            "PROJECT": self.project_values,
            "D_HEAD": self.d,
            "BLOCK_D": _block(self.d),
            "BLOCK_F": _block(self.F, 1),
            "BLOCK_H": tile.heads,
            "BLOCK_T": tile.tokens,
            "BLOCK_W": tile.columns,
            "PRECISION": self.precision,
            **constants,
        }
        wanted = {name: known[name] for name in kernel.arg_names if name in known}
        sizes = (self.h, self.N, self.T, self.F)
        launch(kernel, programs, (*args, scale, sizes), wanted, tile.warps)


def launch(
    kernel: Any, programs: int, args: tuple[Any, ...], constants: dict[str, Any], warps: int
) -> None:
    """The only place that launches: what is compiled ahead of time is recorded here."""
    kernel[(programs,)](*args, **constants, num_warps=warps, num_stages=1)


def _block(size: int, least: int = 16) -> int:
    """The power of two that holds `size`; products of blocks want at least 16."""
    return max(least, 1 << (size - 1).bit_length())


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _strided(x: Tensor) -> tuple[Any, ...]:
    """Four dimensions as kernels take them: with the strides of all but the last, which is 1."""
    return (x, *x.stride()[:3])


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("slowfast_lara::temporal_stage", mutates_args=())
def temporal_stage(
    q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool
) -> tuple[Tensor, Tensor]:
    """y [B,N,h,d], and for the backward pass the attention [h,F,B*N] in float32.

    q [B,N,h,d], unscaled; x [B,F,N,D]; weight [2D,D] and bias [2D] as in `temporal_attention`.
    """
    run = _Launcher(q, x, project_values)
    out, attention = _outputs(q, x)
    weight, tile = weight.contiguous(), run.tile(forward_kernel)
    run(
        forward_kernel,
        _blocks(run.h, tile.heads) * _blocks(run.T, tile.tokens),
        _strided(_dense_rows(q)),
        _strided(_dense_rows(x)),
        weight,
        weight if bias is None else bias.contiguous(),
        attention,
        out,
        scale=run.d**-0.5,
        BIAS=bias is not None,
    )
    return out, attention


def _outputs(q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    B, N, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(h, x.shape[1], B * N, dtype=torch.float32)


@temporal_stage.register_fake
def _(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, project_values: bool):
    return _outputs(q, x)


@torch.library.custom_op("slowfast_lara::temporal_stage_backward", mutates_args=())
def temporal_stage_backward(
    grad: Tensor, q: Tensor, x: Tensor, weight: Tensor, attention: Tensor, project_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, x and weight. That of W_v is zero if the values are x."""
    run = _Launcher(q, x, project_values)
    grad, q, x, weight = (_dense_rows(y) for y in (grad, q, x, weight.contiguous()))
    d_q, d_x, _ = _gradients(q, x, weight)
    d_logits = torch.empty_like(attention)
    rows, factors, scale = (q, grad), (d_logits, attention), run.d**-0.5
    tile = run.tile(backward_queries_kernel)
    run(
        backward_queries_kernel,
        _blocks(run.h, tile.heads) * _blocks(run.T, tile.tokens),
        *(_strided(grad), _strided(x), weight, attention, d_logits, d_q),
        scale=scale,
    )
    tile = run.tile(backward_tokens_kernel)
    run(
        backward_tokens_kernel,
        _blocks(run.D, tile.columns) * _blocks(run.T, tile.tokens),
        *(_strided(q), _strided(grad), weight, attention, d_logits, _strided(d_x)),
        scale=scale,
        BLOCK_F=16,
        BLOCK_K=min(_block(run.d), 32),
    )
    tile = run.tile(backward_weight_kernel)
    parts = weight.new_empty(PARTS, (1 + project_values) * run.D, run.D, dtype=torch.float32)
    for i in range(1 + project_values):
        run(
            backward_weight_kernel,
            PARTS * _blocks(run.h, tile.heads) * _blocks(run.D, tile.columns),
            *(_strided(rows[i]), _strided(x), factors[i], (parts, parts.stride(0))),
            scale=1.0 if i else scale,
            LENGTH=_blocks(_blocks(run.T, tile.tokens), PARTS),
            FIRST_ROW=i * run.D,
        )
    d_weight = torch.zeros_like(weight)
    d_weight[: len(parts[0])] = parts.sum(0)
    return d_q, d_x, d_weight


def _gradients(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), torch.empty_like(_dense_rows(x)), weight.new_empty(weight.shape)


@temporal_stage_backward.register_fake
def _(grad, q: Tensor, x: Tensor, weight: Tensor, attention: Tensor, project_values: bool):
    return _gradients(q, x, weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, x, weight, bias, ctx.project_values = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, x, weight, output[1])


def _gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, x, weight, attention = ctx.saved_tensors
    d_q, d_x, d_weight = temporal_stage_backward(grad, q, x, weight, attention, ctx.project_values)
    d_bias = bias_gradient(grad, ctx.project_values) if ctx.has_bias else None
    return d_q, d_x, d_weight, d_bias, None


temporal_stage.register_autograd(_gradient, setup_context=_keep)
