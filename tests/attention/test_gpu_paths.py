"""Code paths that only GPUs take, run on the CPU: outputs and gradients."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernel_counts import count_kernels
from slowfast_lara import attention
from slowfast_lara.attention import importance_sampling, importance_sdpa, lara, ra
from slowfast_lara.attention.landmarks import farthest_tokens, segment_means
from slowfast_lara.attention.sdpa import sdpa_supports
from slowfast_lara.attention.tensors import to_float32
from tests.helpers import reference
from tests.helpers.comparing import assert_close, assert_same_function
from tests.helpers.qkv import SIZES, normal, qkv, qkv_of_layer

over_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)


@over_sizes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("zeros", [3, 7])
def test_ra_with_padded_components(sizes, dtype, zeros):
    B, h, F, P, d, _ = sizes
    samples, (_, k, v) = normal(B, h, F * P, d, seed=5), qkv(B, h, 1, P, d)
    assert_same_function(
        lambda w, k, v: ra.sample_attention(w, k, v, zeros),
        lambda w, k, v: reference.ra_sample(None, k, v, w),
        [samples, k, v],
        dtype,
    )


def test_biased_ra_with_an_odd_head_size_makes_no_attention_matrix():
    q = torch.empty(2, 3, 40, 18, device="meta")
    kernels, out = count_kernels(lambda: attention.ra_attention(q, q, q, num_frames=2, biased=True))
    assert out.shape == (2, 3, 40, 2, 18)
    assert "bmm" not in {kernel.name for kernel in kernels}


@pytest.mark.parametrize("batch", [1, 3])
def test_exact_attention_has_the_layout_of_the_temporal_stage(batch):
    """[B,F,N,D] is a view of the output: nothing is copied."""
    out = attention.softmax_attention(*qkv_of_layer(batch, 2, 4, 5, 8), num_frames=4)
    paths = out.permute(0, 3, 2, 1, 4).flatten(3)
    assert paths.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


@pytest.fixture
def on_gpu(monkeypatch):
    """Make importance sampling use fused attention, as on a GPU."""

    def estimate(make_samples, q, k, v, *given, num_frames, kernels):
        samples = make_samples(k, False, *map(to_float32, given))
        return importance_sdpa.estimate_by_sdpa(q, k, v, samples, num_frames)

    monkeypatch.setattr(attention.lara, "estimate", estimate)
    monkeypatch.setattr(attention.performer, "estimate", estimate)


def lara_and_reference(F, weighting, beta, noise):
    """LARA and its reference, as functions of q, k, v and the landmarks."""
    return (
        lambda *inputs: attention.lara_attention(
            *inputs,
            num_frames=F,
            weighting=weighting,
            beta=beta,
            noise=None if noise is None else noise.to(inputs[3].dtype),
        ),
        lambda *inputs: reference.lara(*inputs, F, weighting, beta, noise),
    )


over_weightings = pytest.mark.parametrize(
    "weighting, beta", [("balance", 1.0), ("decoupled", 2.0), ("decoupled", 5.0), ("coupled", 1.0)]
)


@over_sizes
@over_weightings
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_lara_by_fused_attention(on_gpu, sizes, weighting, beta, dtype):
    B, h, F, P, d, C = sizes
    q, k, v = qkv_of_layer(B, h, F, P, d)
    landmarks = [segment_means(x, C, num_frames=F) for x in (q, k)]
    function, expected = lara_and_reference(F, weighting, beta, normal(B, h, C, d, seed=3))
    assert_same_function(function, expected, [q, k, v, *landmarks], dtype)


@over_sizes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_performer_by_fused_attention(on_gpu, sizes, dtype):
    B, h, F, P, d, C = sizes
    assert_same_function(
        lambda q, k, v, w: attention.performer_attention(q, k, v, w, num_frames=F),
        lambda q, k, v, w: reference.performer(q, k, v, w, F),
        [*qkv_of_layer(B, h, F, P, d), normal(h, C, d, seed=1)],
        dtype,
    )


def test_sdpa_only_where_pytorch_has_the_operator(monkeypatch):
    """Apple's GPUs lack it, and no device has it for float64."""
    with FakeTensorMode():
        for device in ("cuda", "mps", "cpu"):
            half, double = torch.empty(2, device=device).half(), torch.empty(2, device=device)
            assert sdpa_supports(half) is (device == "cuda")
            assert not sdpa_supports(double.double())
    monkeypatch.setattr(importance_sampling, "estimate_by_sdpa", None)
    q, w = torch.empty(1, 2, 12, 8, device="meta").double(), torch.empty(2, 5, 8, device="meta")
    out = attention.performer_attention(q, q, q, w.double(), num_frames=3)
    assert out.shape == (1, 2, 12, 3, 8)


def test_values_with_another_dtype_or_size(on_gpu):
    (q, k, v), w = qkv_of_layer(2, 2, 3, 5, 8), normal(2, 6, 8, seed=1)
    out = attention.performer_attention(q.half(), k.half(), v.float(), w.half(), num_frames=3)
    assert out.dtype == torch.float16
    assert_close(out, reference.performer(q, k, v, w, 3), 1e-2)
    q, k, v, w = (x.float().to("meta") for x in (q, k, torch.cat((v, v), -1), w))
    assert attention.performer_attention(q, k, v, w, num_frames=3).shape == (2, 2, 15, 3, 16)


def test_farthest_tokens_in_half_precision_equal_float32():
    """Neighbours in time whose distances to their mean are equal in half precision."""
    x = (10 + normal(1, 2, 4 * 16, 8) / 10).bfloat16()
    chosen = farthest_tokens(x, 16, num_frames=4)
    assert torch.equal(chosen, farthest_tokens(x.float(), 16, num_frames=4))


# With a larger beta, rounding decides whether an alpha is clamped and its gradient zero.
@pytest.mark.parametrize(
    "weighting, beta", [("balance", 1.0), ("decoupled", 1.0), ("decoupled", 2.0), ("coupled", 1.0)]
)
@pytest.mark.parametrize("dtype, error", [(torch.float16, 1e-2), (torch.bfloat16, 4e-2)])
def test_lara_in_half_precision(on_gpu, weighting, beta, dtype, error):
    """Outputs and gradients against float64 on the same numbers, relative to the largest."""
    B, h, F, P, d, C = sizes = (2, 2, 4, 36, 32, 16)
    inputs = [x.to(dtype) for x in qkv_of_layer(*sizes[:5])]
    inputs += [segment_means(x, C, num_frames=F) for x in inputs[:2]]
    function, expected = lara_and_reference(F, weighting, beta, normal(B, h, C, d, seed=3).float())
    direction = normal(B, h, F * P, F, d, seed=4)

    def results(function, inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = function(*inputs)
        loss = (out.double() * direction).sum()
        return [out, *torch.autograd.grad(loss, inputs)]

    actual = results(function, inputs)
    exact = results(expected, [x.double() for x in inputs])
    names = ("output", "q", "k", "v", "q landmarks", "k landmarks")
    assert actual[0].dtype == dtype
    for name, ours, theirs in zip(names, actual, exact):
        size = theirs.abs().max()
        assert_close(ours / size, theirs / size, error, name)


@pytest.mark.parametrize("scale", [10, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighting", lara.WEIGHTINGS)
def test_any_scale_is_finite_and_inside_the_range_of_the_values(on_gpu, scale, dtype, weighting):
    estimator = attention.build_estimator(
        "lara", head_dim=8, num_heads=2, num_landmarks=6, weighting=weighting
    )
    torch.manual_seed(1)
    q, k, v = qkv_of_layer(2, 2, 3, 7, 8)
    given = [x.to(dtype).requires_grad_() for x in (q * scale, k * scale, v)]
    out = estimator(*given, num_frames=3)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().square().sum(), given)
    assert all(x.isfinite().all() for x in (out, *grads))
    values = given[2].detach().unflatten(2, (3, 7)).float()
    error = 1e-5 if dtype == torch.float32 else 1e-2
    assert (out >= values.amin(3)[:, :, None] - error).all()
    assert (out <= values.amax(3)[:, :, None] + error).all()
