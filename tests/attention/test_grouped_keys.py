"""Attention over groups of keys: merged, tome, pooled and eva against float64 references."""

import math

import pytest
import torch

from slowfast_lara import attention
from slowfast_lara.attention import build_estimator, groups
from slowfast_lara.attention.eva import windows_and_chunks
from slowfast_lara.attention.merged import choose_groups, key_features
from slowfast_lara.attention.pooled import grid_blocks
from tests.helpers import reference
from tests.helpers.comparing import assert_close, assert_same_function
from tests.helpers.qkv import normal, qkv

# B, h, F, P, d, m: one frame and several, square grids and odd numbers of tokens.
SIZES = [(2, 2, 1, 23, 8, 5), (1, 3, 2, 16, 16, 8), (1, 2, 3, 25, 24, 9), (1, 1, 5, 13, 64, 12)]
over_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)
WEIGHTS = (0.7, 0.0)  # of the values, where tokens are compared
EXACT_AT_ALL_KEYS = ("merged", "tome", "pooled", "eva")


def compare(function, reference_function, inputs):
    for dtype in (torch.float64, torch.float32):
        assert_same_function(function, reference_function, inputs, dtype)


@over_sizes
@pytest.mark.parametrize("values", WEIGHTS)
@pytest.mark.parametrize("rounds", [1, 4])
def test_merged(sizes, values, rounds):
    *shape, m = sizes
    F = shape[2]
    compare(
        lambda q, k, v: attention.merged_attention(
            q, k, v, num_groups=m, num_frames=F, rounds=rounds, values=values
        ),
        lambda q, k, v: reference.merged(q, k, v, m, F, rounds, values),
        qkv(*shape),
    )


@over_sizes
@pytest.mark.parametrize("name", ["tome", "pooled"])
def test_groups_with_equal_shares(sizes, name):
    *shape, m = sizes
    F = shape[2]
    function = getattr(attention, f"{name}_attention")
    compare(
        lambda q, k, v: function(q, k, v, num_groups=m, num_frames=F),
        lambda q, k, v: getattr(reference, name)(q, k, v, m, F),
        qkv(*shape),
    )


@over_sizes
@pytest.mark.parametrize("noisy", [False, True])
def test_eva(sizes, noisy):
    B, h, F, P, d, m = sizes
    windows, chunks = windows_and_chunks(P, m)
    noise = normal(B, h, F, max(chunks) + 1, d, seed=3) if noisy else None
    compare(
        lambda q, k, v: attention.eva_attention(q, k, v, num_keys=m, num_frames=F, noise=noise),
        lambda q, k, v: reference.eva(q, k, v, windows, chunks, F, noise),
        qkv(B, h, F, P, d),
    )


@over_sizes
def test_the_gpu_path_equals_the_reference(sizes, monkeypatch):
    """Biases as components of the head and sums by one-hot matmuls, run on the CPU."""
    *shape, m = sizes
    F = shape[2]
    monkeypatch.setattr(groups, "sdpa_supports", lambda x: True)
    assert_same_function(
        lambda q, k, v: attention.merged_attention(q, k, v, num_groups=m, num_frames=F),
        lambda q, k, v: reference.merged(q, k, v, m, F),
        qkv(*shape),
        torch.float32,
    )


@pytest.mark.parametrize("name", EXACT_AT_ALL_KEYS)
@pytest.mark.parametrize("more", [0, 1, 100])
def test_as_many_groups_as_keys_are_exact(name, more):
    q, k, v = qkv(1, 2, 3, 11, 8)
    out = build_estimator(name, head_dim=8, num_landmarks=11 + more).eval()(q, k, v, num_frames=3)
    assert_close(out, attention.softmax_attention(q, k, v, num_frames=3), 1e-12)


@pytest.mark.parametrize("values", WEIGHTS)
def test_merged_is_exact_where_the_groups_are_equal_keys(values):
    """Nine copies each of five keys, with values of their own: five groups are exact."""
    q = normal(1, 2, 45, 8, seed=1)
    distinct = normal(1, 2, 5, 8, seed=2).repeat_interleave(9, dim=2)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(3))
    k, v = distinct[:, :, order], normal(1, 2, 45, 8, seed=4)
    if values:  # equal keys must have equal values too, to be compared as equal
        v = normal(1, 2, 5, 8, seed=4).repeat_interleave(9, dim=2)[:, :, order]
    out = attention.merged_attention(q, k, v, num_groups=5, values=values)
    assert_close(out, attention.softmax_attention(q, k, v), 1e-12)


@pytest.mark.parametrize("values", WEIGHTS)
@pytest.mark.parametrize("name", ["keys", "values", "queries", "all"])
def test_equal_inputs_give_finite_results(values, name):
    """Ties everywhere."""
    inputs = dict(zip(("queries", "keys", "values"), normal(3, 1, 2, 30, 8)))
    for each in inputs if name == "all" else [name]:
        inputs[each] = inputs[each][:, :, :1].expand(-1, -1, 30, -1)
    q, k, v = (x.clone().requires_grad_() for x in inputs.values())
    out = attention.merged_attention(q, k, v, num_groups=7, num_frames=2, values=values)
    out.square().sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))
    if name in ("keys", "all"):
        assert_close(out, attention.softmax_attention(q, k, v, num_frames=2), 1e-12)


def choose(k, v, m):
    pairs = torch.cat((k, v), dim=-1)
    return choose_groups(key_features(pairs - pairs.mean(-2, keepdim=True), 0.7), m, 4)


@pytest.mark.parametrize("distinct", [1, 3, 29])
def test_no_group_is_empty(distinct):
    _, k, v = qkv(1, 1, 1, 30, 8)
    index = torch.arange(30) % distinct
    chosen = choose(k[:, :, index], v[:, :, index], 12)
    assert chosen.unique().tolist() == list(range(12))


def test_the_choice_is_deterministic_and_so_are_the_gradients():
    runs = []
    for _ in range(2):
        q, k, v = (x.float().requires_grad_() for x in qkv(2, 3, 4, 49, 16))
        out = attention.merged_attention(q, k, v, num_groups=12, num_frames=4)
        out.sin().sum().backward()
        runs.append([out, q.grad, k.grad, v.grad])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_groups_do_not_depend_on_the_scale_of_keys_and_values():
    _, k, v = qkv(1, 2, 1, 40, 8)
    expected = choose(k, v, 9)
    for key_scale, value_scale in ((10, 1), (1, 10), (1e-3, 1e3)):
        assert torch.equal(choose(key_scale * k + 3, value_scale * v - 5, 9), expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_error_bound_of_the_docs_holds_for_random_keys(seed):
    """delta: the largest difference of (q - r).k / sqrt(d) between two keys of a group."""
    q, k, v = (x[0, 0] for x in qkv(1, 1, 1, 60, 8, seed=seed))
    own = choose(k[None], v[None], 10)[0].tolist()
    r, root = q.mean(0), math.sqrt(8)
    mass_errors, value_errors = [], []
    for part in reference.members(own):
        shifts = (q - r) @ k[part].T / root
        delta = shifts.amax(-1) - shifts.amin(-1)
        shares = (k[part] @ r / root).softmax(0)
        k_c, v_c = shares @ k[part], shares @ v[part]
        missing = (q @ k[part].T / root).logsumexp(-1) - q @ k_c / root
        missing = missing + (shares * shares.log()).sum()
        assert (missing >= -1e-12).all()
        assert (missing <= delta**2 / 8 + 1e-12).all()
        exact = (q @ k[part].T / root).softmax(-1) @ v[part]
        bound = torch.tanh(delta / 4) * torch.cdist(v[part], v[part]).max()
        assert ((exact - v_c).norm(dim=-1) <= bound + 1e-12).all()
        second_order = (q - r).square().mean() * (shares @ (k[part] - k_c).square().sum(-1)) / 16
        mass_errors.append((delta**2 / 8 - second_order, -second_order.expand_as(delta)))
        value_errors.append(bound)
    highest = torch.stack([high for high, _ in mass_errors]).amax(0)
    lowest = torch.stack([low for _, low in mass_errors]).amin(0)
    bound = torch.stack(value_errors).amax(0)
    bound = bound + torch.tanh((highest - lowest) / 4) * torch.cdist(v, v).max()
    inputs = [x[None, None] for x in (q, k, v)]
    difference = attention.merged_attention(*inputs, num_groups=10)
    difference = (difference - attention.softmax_attention(*inputs)).squeeze().norm(dim=-1)
    assert (difference <= bound + 1e-12).all()


def test_merged_is_nearer_than_the_published_attentions_at_equal_cost():
    """Smooth keys: half of the keys as groups, against as many landmarks."""
    errors = {}
    generator = torch.Generator().manual_seed(0)
    field = torch.randn(1, 2, 4, 4, 4, 16, generator=generator)
    smooth = torch.nn.functional.interpolate(
        field.permute(0, 1, 2, 5, 3, 4).flatten(0, 2), (8, 8), mode="bicubic"
    )
    k = smooth.view(1, 2, 4, 16, 64).permute(0, 1, 2, 4, 3).flatten(2, 3)
    q, v = k * 2, k.flip(-1)
    exact = attention.softmax_attention(q, k, v, num_frames=4)
    for name in ("merged", "lara", "performer", "nystrom", "orthoformer"):
        estimator = build_estimator(name, head_dim=16, num_landmarks=24).eval()
        out = estimator(q, k, v, num_frames=4)
        errors[name] = ((out - exact).square().sum() / exact.square().sum()).item()
    assert all(errors["merged"] < errors[name] / 5 for name in errors if name != "merged"), errors


@pytest.mark.parametrize("tokens, most", [(196, 96), (196, 1), (64, 18), (9, 9), (50, 7), (1, 1)])
def test_blocks_cover_the_grid(tokens, most):
    blocks = grid_blocks(tokens, most)
    assert len(blocks) == tokens
    assert sorted(set(blocks)) == list(range(max(blocks) + 1))
    assert max(blocks) < most


@pytest.mark.parametrize("tokens, keys", [(196, 96), (64, 18), (50, 7), (16, 2), (9, 1)])
def test_chunks_lie_within_windows(tokens, keys):
    windows, chunks = windows_and_chunks(tokens, keys)
    assert sorted(set(chunks)) == list(range(max(chunks) + 1))
    for part in reference.members(chunks):
        assert len({windows[token] for token in part}) == 1


def test_eva_refuses_other_queries():
    q, k, v = qkv(1, 1, 2, 9, 8)
    with pytest.raises(ValueError, match="as many queries as keys, got 5 and 18"):
        attention.eva_attention(q[:, :, :5], k, v, num_keys=4, num_frames=2)
