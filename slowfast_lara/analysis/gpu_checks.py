"""Whether what runs on a GPU agrees with float64: outputs and gradients, small cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention import ESTIMATORS, build_estimator
from slowfast_lara.errors import first_line
from slowfast_lara.models.temporal import temporal_attention

# Largest difference allowed, relative to the largest number of the same tensor.
ALLOWED = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
B, h, F, P, d, C = 2, 3, 4, 36, 64, 24

CASES: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {}),
    *(("lara", {"weighting": weighting}) for weighting in ("balance", "coupled", "decoupled")),
    ("lara", {"proposal": "global", "weighting": "balance"}),
    ("lara", {"landmarks": "farthest"}),
    ("performer", {}),
    ("nystrom", {}),
]


class Check(NamedTuple):
    """The largest difference of a case, relative to the largest number, or why there is none."""

    name: str
    precision: str
    kernels: str
    difference: float | None
    agrees: bool
    failure: str = ""

    def text(self) -> str:
        said = f"{self.name} in {self.precision} by {self.kernels}"
        if self.failure:
            return f"{said}: fails: {self.failure}"
        verdict = "as it may" if self.agrees else "TOO MUCH"
        return f"{said}: differs from float64 by {self.difference:.1e}, {verdict}"


def checks(device: torch.device, precisions: Sequence[str], kernels: Sequence[str]) -> list[Check]:
    """Every case in every precision, by each way to compute it."""
    return [
        _check(name, function, expected, inputs, device, precision, way)
        for way in kernels
        for name, function, expected, inputs in _cases(way)
        for precision in precisions
    ]


Function = Callable[..., Tensor]


def _cases(kernels: str) -> Iterator[tuple[str, Function, Function, list[Tensor]]]:
    """Names, functions by some kernels and plain ones, and float64 inputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for name, options in CASES:
        known = inspect.signature(ESTIMATORS[name]).parameters
        if kernels != "torch" and "kernels" not in known:
            continue
        chosen: dict[str, Any] = {"kernels": kernels} if "kernels" in known else {}
        sizes: dict[str, Any] = {"head_dim": d, "num_heads": h, "num_landmarks": C}
        plain = build_estimator(name, **sizes, **options).double().eval()
        estimator = build_estimator(name, **sizes, **options, **chosen).eval()
        label = "-".join(("exact" if name == "softmax" else name, *options.values()))
        inputs = [normal(B, h, F * P, d) for _ in range(3)]
        yield label, partial(estimator, num_frames=F), partial(plain, num_frames=F), inputs
    for projected in (False, True):
        shapes = ((B, F * P, h, d), (B, F, F * P, h * d), (2 * h * d, h * d), (2 * h * d,))
        inputs = [normal(*shape) for shape in shapes]
        inputs[2] /= (h * d) ** 0.5
        name = "temporal, projected values" if projected else "temporal"
        stage = partial(temporal_attention, project_values=projected)
        yield name, partial(stage, kernels=kernels), stage, inputs


def _check(
    name: str,
    function: Any,
    expected: Function,
    inputs: Sequence[Tensor],
    device: torch.device,
    precision: str,
    kernels: str,
) -> Check:
    dtype = getattr(torch, precision)
    given = [x.to(dtype) for x in inputs]
    if isinstance(getattr(function, "func", None), torch.nn.Module):
        function.func.to(device)
    try:
        actual = _results(function, [x.to(device) for x in given])
    except Exception as error:  # a kernel that does not compile or start; the others are of use
        failure = f"{type(error).__name__}: {first_line(error)}"
        return Check(name, precision, kernels, None, False, failure)
    exact = _results(expected, [x.double() for x in given])
    difference = max(
        (got.double().cpu() - wanted).abs().max().item() / wanted.abs().max().clamp(min=1e-9).item()
        for got, wanted in zip(actual, exact)
    )
    return Check(name, precision, kernels, difference, difference <= ALLOWED[dtype])


def _results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of its sum with fixed weights; zeros where there is none."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    total = (out.double() * weights.to(out.device)).sum()
    grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]
