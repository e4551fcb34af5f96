"""The temporal stage's Triton kernels in Triton's interpreter; run by test_temporal_kernels.py.

TRITON_INTERPRET=1 has to be set before Triton is imported: hence a process of its own.
bfloat16 cannot be tested so: the interpreter's products of it are wrong.
"""

import pytest
import torch
from torch import Tensor

from slowfast_lara.attention import build_estimator
from slowfast_lara.models.space_time import TrajectoryAttention
from slowfast_lara.models.temporal import temporal_attention
from slowfast_lara.models.temporal_kernels import temporal_stage, temporal_stage_backward

# Largest difference to float64, as a share of the scale.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}


def plain(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor, project_values: bool) -> Tensor:
    """Every key and value projected, as in the article."""
    h, d = q.shape[2:]
    kv = torch.nn.functional.linear(x, weight, bias).unflatten(3, (2, h, d))
    values = kv[:, :, :, 1] if project_values else x.unflatten(3, (h, d))
    shares = torch.einsum("bnhd,bfnhd->bnhf", q * d**-0.5, kv[:, :, :, 0]).softmax(-1)
    return torch.einsum("bnhf,bfnhd->bnhd", shares, values)


def inputs(B, N, h, d, F, dtype=torch.float32, size=1.0):
    """q, x (strided views, as the layer gives them), weight, bias, and a gradient of y."""
    torch.manual_seed(B * N + d)
    D = h * d
    q = (size * torch.randn(B, h, N, d)).transpose(1, 2)
    x = (size * torch.randn(F, N, B, D)).permute(2, 0, 1, 3)
    weight, bias = torch.randn(2 * D, D) * D**-0.5, torch.randn(2 * D)
    # Small enough that gradients of inputs of this size can be written in half precision.
    grad = torch.randn(B, N, h, d) / size**2
    return [y.to(dtype) for y in (q, x, weight, bias, grad)]


def run(function, given, project_values):
    *given, grad = (y.detach().requires_grad_() for y in given)
    out = function(*given, project_values)
    grads = torch.autograd.grad(out, given, grad, allow_unused=True, materialize_grads=True)
    return [out, *grads]


def assert_equal_to_float64(given, project_values, path="triton"):
    actual = run(lambda *args: temporal_attention(*args, kernels=path), given, project_values)
    expected = run(plain, [y.double() for y in given], project_values)
    q, x, _, _, grad = (y.double() for y in given)
    # Where the softmax picks one frame, gradients of q and W_k are far below their terms: the
    # scale is that of the terms of a sum over d numbers, with weights of size one.
    terms = grad.std() * x.std().square()
    scales = [0, terms, 0, 0 if project_values else terms * q.std(), 1e-9]
    for name, a, e, scale in zip(("y", "q", "x", "weight", "bias"), actual, expected, scales):
        scale = max(e.abs().max().item(), float(scale))
        difference = (a.double() - e).abs().max().item() / scale
        assert difference <= TOLERANCE[a.dtype], f"{name}: {difference:.1e} of {scale:.1e}"


FAST = [
    ((2, 13, 3, 8, 3), torch.float32, 1, True),
    ((1, 17, 5, 24, 5), torch.float32, 10, False),
    ((1, 33, 2, 64, 8), torch.float16, 1, False),
    ((1, 9, 1, 128, 4), torch.float16, 100, True),
]
SIZES = [(2, 13, 3, 8, 3), (1, 21, 5, 24, 5), (1, 37, 2, 64, 8), (2, 19, 1, 80, 1)]
SIZES += [(1, 9, 2, 128, 9), (1, 5, 17, 8, 2), (1, 6, 1, 16, 33)]


@pytest.mark.parametrize("sizes, dtype, size, project_values", FAST)
def test_equal_to_float64(sizes, dtype, size, project_values):
    assert_equal_to_float64(inputs(*sizes, dtype=dtype, size=size), project_values)


@pytest.mark.slow
@pytest.mark.parametrize("project_values", [False, True])
@pytest.mark.parametrize("size", [1, 10, 100])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equal_to_float64_everywhere(sizes, dtype, size, project_values):
    assert_equal_to_float64(inputs(*sizes, dtype=dtype, size=size), project_values)


@pytest.mark.parametrize("project_values", [False, True])
def test_the_torch_path_passes_the_same_test(project_values):
    for sizes in SIZES:
        assert_equal_to_float64(inputs(*sizes), project_values, "torch")


@pytest.mark.parametrize("project_values", [False, True])
def test_gradients_are_the_same_bit_for_bit(project_values):
    given = inputs(2, 9, 2, 16, 3)
    triton = lambda *args: temporal_attention(*args, kernels="triton")  # noqa: E731
    first, second = (run(triton, given, project_values) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_no_bias_and_dense_inputs():
    q, x, weight, _, grad = (y.contiguous() for y in inputs(1, 7, 2, 16, 3))
    with_zeros = run(plain, (q, x, weight, torch.zeros(64), grad), True)[0]
    out = temporal_attention(q, x, weight, None, True, "triton")
    assert (out - with_zeros).abs().max() < 1e-5


@pytest.mark.parametrize("project_values", [False, True])
def test_operators_are_well_behaved(project_values):
    q, x, weight, bias, grad = (y.detach().requires_grad_() for y in inputs(1, 5, 2, 8, 2))
    torch.library.opcheck(temporal_stage, (q, x, weight, bias, project_values))
    with torch.no_grad():
        _, attention = temporal_stage(q, x, weight, bias, project_values)
    given = [y.detach() for y in (grad, q, x, weight, attention)]
    torch.library.opcheck(temporal_stage_backward, (*given, project_values))


def test_a_layer_compiles_whole_and_is_equal():
    torch.manual_seed(0)
    estimator = build_estimator("softmax", head_dim=8)
    layer = TrajectoryAttention(16, 2, estimator, True, 0.0, kernels="triton")
    x = torch.randn(1, 1 + 2 * 3, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out, expected = compiled(x, 2), layer(x, 2)
    assert (out - expected).abs().max() < 1e-6
    layer.kernels = "torch"
    assert (expected - layer(x, 2)).abs().max() < 1e-5
    gradients = torch.autograd.grad(out.square().sum(), layer.proj_kv.weight)[0]
    assert gradients.abs().max() > 0
