"""Tolerances by dtype, and comparisons that assert."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Largest allowed difference of outputs and gradients, by the dtype under test.
# Gradients above 1 (some reach 40) are compared relative to their largest value.
OUTPUT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}
GRADIENT = {torch.float64: 1e-10, torch.float32: 1e-4}


def assert_close(actual: Tensor, expected: Tensor, atol: float, what: str = "") -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    difference = (actual.double() - expected.double()).abs().max().item()
    assert difference <= atol, f"{what}: differs by {difference:.2e}, allowed {atol:.0e}"


def assert_same_function(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """Assert that outputs and gradients in a dtype equal those of a float64 reference."""
    given = [x.to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in given]
    out, expected = function(*given), reference(*exact)
    assert out.dtype == dtype
    assert_close(out, expected, OUTPUT[dtype], "output")
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).double()
    grads = torch.autograd.grad((out * direction.to(dtype)).sum(), given)
    expected_grads = torch.autograd.grad((expected * direction).sum(), exact)
    for i, (grad, expected_grad) in enumerate(zip(grads, expected_grads)):
        size = max(1.0, expected_grad.abs().max().item())
        assert_close(grad / size, expected_grad / size, GRADIENT[dtype], f"gradient of input {i}")
