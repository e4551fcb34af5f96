"""Comparison of the Triton kernels with PyTorch's operations on the user's GPU.

`slowfast-lara benchmark gpu` compares the output and the gradients of each operator with PyTorch's
on a small case. A training or test run uses measure.py instead, at the shapes of its own model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention.kernels.combine import combine
from slowfast_lara.attention.kernels.key_stats import key_stats
from slowfast_lara.attention.kernels.landmarks import landmarks
from slowfast_lara.attention.kernels.launch import interpreted, matmul_precision
from slowfast_lara.attention.kernels.merged import MAX_GROUPS, merged
from slowfast_lara.attention.kernels.proposals import proposals
from slowfast_lara.attention.kernels.temporal import temporal
from slowfast_lara.attention.landmarks import farthest_tokens, segment_means
from slowfast_lara.attention.tensors import scaled
from slowfast_lara.errors import first_line

# Largest allowed difference, relative to the largest element of PyTorch's result. It is well above
# rounding errors, and well below the effect of a wrong sum, mask or order.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TOLERANCE_TF32 = 2e-2
_FRAMES, _LANDMARKS = 3, 5


class Case(NamedTuple):
    """An operator, its reference in PyTorch, and the inputs of both."""

    name: str
    kernel: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Sequence[Tensor]


class Comparison(NamedTuple):
    """Largest relative error of an operator's output and gradients."""

    operator: str
    error: float | None  # None if the operator raised an exception, or if the error is not finite
    problem: str  # empty if the operator agrees with PyTorch


def compare_operators(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    reference: torch.dtype = torch.float32,
) -> Iterator[Comparison]:
    """Compare the operators in `dtype` with PyTorch's operations in the dtype `reference`.

    `sizes`: the head size d, and C, the number of samples. `merged` has min(C, MAX_GROUPS) groups.
    """
    tf32 = dtype == torch.float32 and matmul_precision() == "tf32"
    tolerance = _TOLERANCE_TF32 if tf32 else _TOLERANCE[dtype]
    cases = small_cases(*sizes)
    if dtype != torch.float32 or interpreted():  # no kernels of `merged` for float32
        cases.append(merged_case(*sizes))
    for case in cases:
        try:
            yield _compare(case, device, dtype, reference, tolerance)
        except Exception as error:  # e.g. a kernel does not compile or launch
            yield Comparison(case.name, None, f"{type(error).__name__}: {first_line(error)}")


@torch.enable_grad()
def _compare(
    case: Case, device: torch.device, dtype: torch.dtype, reference: torch.dtype, tolerance: float
) -> Comparison:
    rounded = [x.to(device, dtype) for x in case.inputs]
    actual = _with_gradients(case.kernel, rounded)
    expected = _with_gradients(case.reference, [x.to(reference) for x in rounded])
    errors = [
        (ours.to(reference) - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
        for ours, theirs in zip(actual, expected)
    ]
    error, index = (x.item() for x in torch.stack(errors).max(0))  # max propagates NaN
    problem = ""
    if not error <= tolerance:
        what = f"gradient of input {index - 1}" if index else "output"
        problem = f"relative error of the {what} is {error:.1e}; must be at most {tolerance:.0e}"
    return Comparison(case.name, error if math.isfinite(error) else None, problem)


def _with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the inputs for a fixed random gradient of the output."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    direction = _normal(*out.shape, seed=len(inputs)).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


def small_cases(d: int, C: int) -> list[Case]:
    """Cases with few tokens for the variants of all operators except `merged`."""
    B, h, N, F = 1, 2, 7 * _FRAMES, _FRAMES
    q, k, v = _normal(3, B, h, N, d)
    w, tilde, noise = _normal(3, B, h, C, d, seed=1) / 2
    balance, gain, shares = _normal(3, B, h, C, seed=5).softmax(-1)
    L, M = _normal(B, h, F, C, seed=6), _normal(B, h, F, C, d, seed=7)
    tokens = [_normal(B, N, h, d), _normal(B, F, N, h * d, seed=2)]
    weights = [_normal(2 * h * d, h * d, seed=3) * (h * d) ** -0.5, _normal(2 * h * d, seed=4)]
    means, farthest = (partial(_landmarks, farthest=choice) for choice in (False, True))
    plain_means, plain_farthest = (
        partial(function, num_landmarks=_LANDMARKS, num_frames=F)
        for function in (segment_means, farthest_tokens)
    )
    query_weights = [tilde, balance, gain, shares]
    return [
        Case("landmarks (means)", means, plain_means, [k]),
        Case("landmarks (farthest)", farthest, plain_farthest, [k]),
        Case("proposals", _proposals, _plain_proposals, [w, tilde]),
        Case("proposals (noise)", _proposals, _plain_proposals, [w, tilde, noise]),
        Case("key_stats", _key_stats, _plain_key_stats, [w, k, v]),
        Case("key_stats (tied)", _key_stats, _plain_key_stats, [w, k]),
        Case("combine", _combine, _plain_combine, [q, w, L, M]),
        Case("combine (aligned)", _combine, _plain_combine, [q, w, L, M, *query_weights]),
        Case("temporal (projected)", _temporal, _plain_temporal, [*tokens, *weights]),
        Case("temporal", _temporal, _plain_temporal, [*tokens, weights[0]]),
    ]


def merged_case(d: int, C: int) -> Case:
    """A case with pairs of similar keys, so that each pair is a group in any precision."""
    B, h, F, m = 1, 2, _FRAMES, min(C, MAX_GROUPS)
    k, v = _normal(2, B, h, F, m, 1, d) + _normal(2, B, h, F, m, 2, d, seed=1) / 4
    q = 1 + _normal(B, h, 7 * F, d, seed=2)
    return Case("merged", _merged, _plain_merged, [q, *(x.flatten(2, 4) for x in (k, v))])


def _merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(q, k, v, _FRAMES, k.shape[2] // (2 * _FRAMES), 4, 0.7)[0]


def _plain_merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reference of `merged` for groups of two keys, by the equations of attention/merged.py."""
    keys, values = (x.unflatten(2, (_FRAMES, -1, 2)) for x in (k, v))  # [B,h,F,m,2,d]
    scale, mean = q.shape[-1] ** -0.5, q.mean(2)[:, :, None, None, None]
    shares = ((keys * mean).sum(-1, keepdim=True) * scale).softmax(-2)
    kc, vc = ((shares * x).sum(-2) for x in (keys, values))
    spread = (shares * (keys - kc.unsqueeze(-2)).square()).sum((-2, -1))
    variance = q.var(2, correction=0).mean(-1)[:, :, None, None] / (2 * q.shape[-1])
    biases = (spread * variance).detach() - (shares * shares.log()).sum((-2, -1))
    logits = q.unsqueeze(2) @ kc.mT * scale + biases.unsqueeze(-2)  # [B,h,F,N,m]
    return (logits.softmax(-1) @ vc).transpose(2, 3)


def _landmarks(x: Tensor, *, farthest: bool) -> Tensor:
    return landmarks(x, _LANDMARKS, _FRAMES, farthest)[0]


def _proposals(q_tilde: Tensor, k_tilde: Tensor, noise: Tensor | None = None) -> Tensor:
    noise = None if noise is None else noise.float()
    w, q_tilde, log_density, balance = proposals(q_tilde.float(), k_tilde.float(), noise)
    return torch.cat((w, q_tilde, log_density.unsqueeze(-1), balance.unsqueeze(-1)), -1)


def _plain_proposals(q_tilde: Tensor, k_tilde: Tensor, noise: Tensor | None = None) -> Tensor:
    mu = scaled(q_tilde + k_tilde)
    w = mu if noise is None else mu + noise
    log_q = w @ mu.mT - mu.square().sum(-1).unsqueeze(-2) / 2
    own = log_q.diagonal(dim1=-2, dim2=-1)
    balance = (own - log_q.logsumexp(-1)).exp()
    return torch.cat((w, scaled(q_tilde), own.unsqueeze(-1), balance.unsqueeze(-1)), -1)


def _key_stats(w: Tensor, k: Tensor, v: Tensor | None = None) -> Tensor:
    log_sums, means, *_ = key_stats(w.float(), k, v, _FRAMES)
    return torch.cat((log_sums.unsqueeze(-1), means.float()), -1)


def _plain_key_stats(w: Tensor, k: Tensor, v: Tensor | None = None) -> Tensor:
    """Reference of `key_stats`. If v is None, k replaces v, and |k|^2/2 is not subtracted."""
    keys, values = (x.unflatten(2, (_FRAMES, -1)) for x in (scaled(k), k if v is None else v))
    logits = w.unsqueeze(2) @ keys.mT
    if v is not None:
        logits = logits - keys.square().sum(-1).unsqueeze(-2) / 2
    return torch.cat((logits.logsumexp(-1, keepdim=True), logits.softmax(-1) @ values), -1)


def _combine(q: Tensor, w: Tensor, L: Tensor, M: Tensor, *weights: Tensor) -> Tensor:
    query_weights = tuple(x.float() for x in weights) or (None,) * 4
    return combine(q, w.float(), L.float(), M, *query_weights)[0]


def _plain_combine(q: Tensor, w: Tensor, L: Tensor, M: Tensor, *weights: Tensor) -> Tensor:
    scores = scaled(q) @ w.mT
    if weights:
        tilde, *columns = weights
        balance, gain, shares = (x.unsqueeze(-2) for x in columns)
        r = (scaled(q) @ tilde.mT).softmax(-2)
        scores = scores + (balance + gain * (r - r @ shares.mT)).clamp(min=1e-8).log()
    p = (scores.unsqueeze(2) + L.unsqueeze(3)).softmax(-1)  # [B,h,F,N,C]
    return (p @ M).transpose(2, 3)


def _temporal(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Operator `temporal`. With a bias, the values are projected; otherwise they are x."""
    return temporal(q, x, weight, bias, bias is not None)[0]


def _plain_temporal(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reference of `temporal`, by definition: project every token of every frame."""
    h, d = q.shape[2:]
    projected = x @ weight.mT if bias is None else x @ weight.mT + bias
    keys, values = projected.unflatten(3, (2, h, d)).unbind(3)
    logits = torch.einsum("bnhd,bfnhd->bnhf", q, keys) * d**-0.5
    values = x.unflatten(3, (h, d)) if bias is None else values
    return torch.einsum("bnhf,bfnhd->bnhd", logits.softmax(-1), values)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
