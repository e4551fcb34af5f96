"""Comparison of attention on a GPU with float64: outputs and gradients of small cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slowfast_lara.attention import ESTIMATORS, build_estimator
from slowfast_lara.errors import first_line
from slowfast_lara.models.attention_config import display_name
from slowfast_lara.models.temporal import temporal_attention

# The largest allowed difference, relative to the largest element of the same tensor.
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

Function = Callable[..., Tensor]


class Check(NamedTuple):
    """The largest relative difference of a case, or the reason of its failure."""

    name: str
    precision: str
    kernels: str
    difference: float | None
    agrees: bool
    failure: str = ""

    def text(self) -> str:
        case = f"{self.name} in {self.precision}, {self.kernels} kernels"
        if self.failure:
            return f"{case}: failed: {self.failure}"
        verdict = "ok" if self.agrees else "TOO LARGE"
        return f"{case}: difference to float64 {self.difference:.1e}, {verdict}"


def run_checks(
    device: torch.device, precisions: Sequence[str], kernels: Sequence[str]
) -> list[Check]:
    """Check every case in every precision with each choice of kernels."""
    checks = []
    for choice in kernels:
        for name, function, reference, inputs in _cases(choice, device):
            for precision in precisions:
                dtype = getattr(torch, precision)
                try:
                    difference = _difference(function, reference, inputs, device, dtype)
                    check = Check(name, precision, choice, difference, difference <= ALLOWED[dtype])
                except Exception as error:  # a kernel that does not compile or launch
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    check = Check(name, precision, choice, None, False, reason)
                checks.append(check)
    return checks


def _cases(
    kernels: str, device: torch.device
) -> Iterator[tuple[str, Function, Function, list[Tensor]]]:
    """Names, functions with the given kernels, float64 references, and float64 inputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for name, options in CASES:
        has_choice = "kernels" in inspect.signature(ESTIMATORS[name]).parameters
        if kernels != "torch" and not has_choice:
            continue
        build = partial(build_estimator, name, head_dim=d, num_heads=h, num_landmarks=C, **options)
        estimator = (build(kernels=kernels) if has_choice else build()).to(device).eval()
        reference = build().double().eval()
        inputs = [normal(B, h, F * P, d) for _ in range(3)]
        label = "-".join((display_name(name), *options.values()))
        yield label, partial(estimator, num_frames=F), partial(reference, num_frames=F), inputs
    for projected in (False, True):
        shapes = ((B, F * P, h, d), (B, F, F * P, h * d), (2 * h * d, h * d), (2 * h * d,))
        inputs = [normal(*shape) for shape in shapes]
        inputs[2] /= (h * d) ** 0.5
        name = "temporal, projected values" if projected else "temporal"
        stage = partial(temporal_attention, project_values=projected)
        yield name, partial(stage, kernels=kernels), stage, inputs


def _difference(
    function: Function,
    reference: Function,
    inputs: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """The largest difference of the output and the gradients, relative to the largest element."""
    rounded = [x.to(dtype) for x in inputs]
    actual = _output_and_gradients(function, [x.to(device) for x in rounded])
    expected = _output_and_gradients(reference, [x.double() for x in rounded])
    return max(
        (a.double().cpu() - e).abs().max().item() / e.abs().max().clamp(min=1e-9).item()
        for a, e in zip(actual, expected)
    )


def _output_and_gradients(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it; zeros for unused inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    total = (out.double() * weights.to(out.device)).sum()
    grads = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]
