"""The space-time attention layers against textbook forms: outputs and gradients."""

import pytest
import torch
from torch import nn

from benchmarks.kernel_counts import count_kernels
from benchmarks.textbook import TextbookTrajectoryAttention
from slowfast_lara.attention import ESTIMATORS, build_estimator, temporal
from slowfast_lara.models import space_time
from slowfast_lara.models.space_time import (
    ATTENTION_LAYERS,
    DividedAttention,
    JointAttention,
    TrajectoryAttention,
)
from tests.helpers.comparing import assert_close


def outputs_and_gradients(layer, x, num_frames):
    x = x.clone().requires_grad_()
    out = layer(x, num_frames)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(
        (out * weights).sum(), [x, *parameters.values()], allow_unused=True, materialize_grads=True
    )
    return {"output": out, **dict(zip(["x", *parameters], grads))}


def assert_same(layer, reference, x, num_frames):
    actual = outputs_and_gradients(layer, x, num_frames)
    expected = outputs_and_gradients(reference, x, num_frames)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_close(value, expected[name], 1e-10, name)


def make(kind, dim, heads, qkv_bias=True, **options):
    torch.manual_seed(dim + heads)
    layer = kind(
        dim, heads, build_estimator("softmax", head_dim=dim // heads), qkv_bias, 0.0, **options
    )
    for parameter in layer.parameters():  # biases are zero initially
        nn.init.normal_(parameter, std=0.3)
    return layer.double()


@pytest.mark.parametrize("project_values", [False, True], ids=["original", "fixed"])
@pytest.mark.parametrize(
    "B, F, P, heads, head_dim, qkv_bias",
    [
        (1, 1, 5, 1, 8, True),
        (2, 3, 7, 3, 5, True),
        (3, 2, 49, 2, 12, False),
        (1, 5, 37, 4, 16, True),
    ],
)
def test_trajectory_equals_the_textbook(B, F, P, heads, head_dim, qkv_bias, project_values):
    layer = make(
        TrajectoryAttention, heads * head_dim, heads, qkv_bias, project_values=project_values
    )
    x = torch.randn(B, 1 + F * P, heads * head_dim, dtype=torch.float64)
    assert_same(layer, TextbookTrajectoryAttention(layer), x, F)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("kind, name", [("trajectory", "softmax"), ("joint", "nystrom")])
def test_backward_pass_equals_autograd_without_its_zeros(kind, name, prefix, monkeypatch):
    """The gradients of views are not padded to the size of all tokens or paths."""

    def built(dtype):
        estimator = build_estimator(name, head_dim=8, num_heads=2, num_landmarks=3)
        torch.manual_seed(0)
        layer = ATTENTION_LAYERS[kind](16, 2, estimator, True, 0.0, num_prefix=prefix)
        return layer.to(dtype)

    layer, x = built(torch.float64), torch.randn(2, prefix + 3 * 5, 16, dtype=torch.float64)
    with monkeypatch.context() as changed:
        changed.setattr(space_time, "_is_traced", lambda: True)
        expected = outputs_and_gradients(layer, x, 3)
    for key, value in outputs_and_gradients(layer, x, 3).items():
        assert_close(value, expected[key], 1e-12, key)
    if prefix:
        with torch.device("meta"):
            layer = built(torch.bfloat16)
        clip = torch.empty(x.shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        kernels, _ = count_kernels(lambda: layer(clip, 3).sum().backward())
        assert not {"slice_backward", "diagonal_backward"} & {kernel.name for kernel in kernels}


@pytest.mark.parametrize("layer", ATTENTION_LAYERS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_empty_batch(layer, name):
    estimator = build_estimator(name, head_dim=8, num_heads=2, num_landmarks=2)
    built = ATTENTION_LAYERS[layer](16, 2, estimator, True, 0.0)
    x = torch.empty(0, 1 + 3 * 4, 16, requires_grad=True)
    out = built(x, 3)
    assert out.shape == (0, 13, 16)
    out.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_temporal_stage_does_not_depend_on_the_chunk_size(monkeypatch, chunk):
    layer = make(TrajectoryAttention, 12, 2, project_values=True)
    x = torch.randn(2, 1 + 3 * 4, 12, dtype=torch.float64)
    expected = outputs_and_gradients(layer, x, 3)
    monkeypatch.setattr(temporal, "CPU_CHUNK", chunk)
    for name, value in outputs_and_gradients(layer, x, 3).items():
        assert_close(value, expected[name], 1e-12, name)


class MaskedAttention(nn.Module):
    """Joint or divided attention as a mask over all pairs of tokens."""

    def __init__(self, layer, attends):
        super().__init__()
        self.qkv, self.proj, self.heads = layer.qkv, layer.proj, layer.num_heads
        self.attends = attends

    def forward(self, x, num_frames):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts)
        N = x.shape[1] - 1
        mask = torch.zeros(1 + N, 1 + N, dtype=torch.bool)
        mask[0], mask[:, 0] = True, True
        frame, position = torch.arange(N) // (N // num_frames), torch.arange(N) % (N // num_frames)
        mask[1:, 1:] = self.attends(frame, position)
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "kind, options, attends",
    [
        (JointAttention, {}, lambda frame, position: torch.ones(len(frame), len(frame)).bool()),
        (DividedAttention, {}, lambda frame, position: frame[:, None] == frame),
        (
            DividedAttention,
            {"over_time": True},
            lambda frame, position: position[:, None] == position,
        ),
    ],
    ids=["joint", "space", "time"],
)
def test_joint_and_divided_equal_masked_attention(kind, options, attends):
    layer = make(kind, 15, 3, **options)
    x = torch.randn(2, 1 + 4 * 5, 15, dtype=torch.float64)
    assert_same(layer, MaskedAttention(layer, attends), x, 4)


def test_half_precision_gradients_are_accurate_with_small_chunks(monkeypatch):
    layer = make(TrajectoryAttention, 16, 2, project_values=True).float()
    x = torch.randn(1, 1 + 2 * 400, 16)

    def gradient():
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            layer(x, 2).float().sum().backward()
        return layer.proj_kv.weight.grad

    monkeypatch.setattr(temporal, "CPU_CHUNK", 10**6)
    expected = gradient()
    monkeypatch.setattr(temporal, "CPU_CHUNK", 4)
    difference = (gradient() - expected).abs().max() / expected.abs().max()
    assert difference < 0.01  # 0.03 with a bfloat16 accumulator
