"""`hf.replace_sdpa` on models that call PyTorch's scaled_dot_product_attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from slowfast_lara import hf
from slowfast_lara.attention import ESTIMATORS
from tests.helpers.comparing import assert_close


class Block(nn.Module):
    """A layer as in timm's vision transformer."""

    def __init__(self, **arguments):
        super().__init__()
        self.qkv, self.arguments = nn.Linear(24, 72), arguments

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, **self.arguments)
        return x + out.transpose(1, 2).flatten(2)


def blocks(**arguments):
    torch.manual_seed(0)
    return nn.Sequential(Block(**arguments), Block(**arguments)), torch.randn(2, 37, 24)


@pytest.mark.parametrize("arguments", [{}, {"scale": 0.9}, {"dropout_p": 0.0}], ids=str)
def test_softmax_is_pytorchs(arguments):
    model, x = blocks(**arguments)
    with hf.replace_sdpa("softmax") as replaced:
        out = model(x)
    assert replaced.replaced == 2 and not replaced.exact
    assert_close(out, model(x), 1e-6 if "scale" in arguments else 0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator(name):
    model, x = blocks()
    with hf.replace_sdpa(name, groups=9, prefix=1) as replaced:
        out = model(x)
        out.square().sum().backward()
    assert replaced.replaced == 2
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert name == "softmax" or (out - model(x)).abs().max() > 1e-4


def test_prefix_and_frames():
    """Each argument reaches the estimator: prefix tokens attend exactly, frames are grouped."""
    q, k, v = torch.randn(3, 2, 2, 37, 8)
    attention, outs = functional.scaled_dot_product_attention, {}
    for layout in ((0, 1), (1, 1), (1, 4)):
        with hf.replace_sdpa("lara", groups=9, prefix=layout[0], frames=layout[1]):
            outs[layout] = attention(q, k, v)
    assert_close(outs[1, 1][:, :, :1], attention(q[:, :, :1], k, v), 1e-6)
    assert (outs[1, 1] - outs[0, 1])[:, :, :1].abs().max() > 1e-4
    assert (outs[1, 4] - outs[1, 1])[:, :, 1:].abs().max() > 1e-4


def test_random_samples():
    """They depend on the seed alone, and on the call with `training`."""
    q = torch.randn(1, 2, 37, 8)
    attention, outs = functional.scaled_dot_product_attention, []
    for arguments in ({}, {}, {"seed": 1}, {"training": True}):
        with hf.replace_sdpa("performer", groups=9, **arguments):
            outs.append([attention(q, q, q) for _ in range(2)])
    (first, again), (same, _), (other, _), (drawn, redrawn) = outs
    assert_close(again, first, 0)
    assert_close(same, first, 0)
    assert (other - first).abs().max() > 1e-4 and (redrawn - drawn).abs().max() > 1e-4


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"is_causal": True}, "causal"),
        ({"attn_mask": torch.ones(37, 37, dtype=torch.bool).tril()}, "mask"),
    ],
)
def test_unsupported_calls_stay_exact(arguments, reason):
    model, x = blocks(**arguments)
    with pytest.raises(RuntimeError, match=f"no call .* was replaced.*{reason}"):  # noqa: SIM117
        with hf.replace_sdpa("merged", groups=9) as replaced:
            out = model(x)
    assert sum(replaced.exact.values()) == 2 and replaced.replaced == 0
    assert_close(out, model(x), 0)


def test_cross_attention_and_few_tokens_stay_exact():
    q, k, few = (torch.randn(1, 2, tokens, 8) for tokens in (40, 30, 20))
    attention = functional.scaled_dot_product_attention
    with hf.replace_sdpa("merged", groups=20) as replaced:
        outs = attention(q, k, k), attention(q, key=k, value=k), attention(few, few, few)
        attention(k, k, k)
    for out, inputs in zip(outs, [(q, k, k), (q, k, k), (few, few, few)]):
        assert_close(out, attention(*inputs), 0)
    assert replaced.replaced == 1 and sum(replaced.exact.values()) == 3


def test_prefix_tokens_attend_exactly():
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    attention = functional.scaled_dot_product_attention
    with hf.replace_sdpa("merged", groups=9, prefix=3):
        out = attention(q, k, v)
    difference = (out - attention(q, k, v)).abs().amax(dim=(0, 1, 3))
    assert difference[:3].max() < 1e-6 < 1e-4 < difference[3:].max()


def test_an_error_inside_the_context_is_not_hidden():
    with pytest.raises(KeyError), hf.replace_sdpa("merged"):
        raise KeyError


def test_bad_arguments():
    with pytest.raises(ValueError, match="must be one of"):
        hf.replace_sdpa("nothing")
    with pytest.raises(TypeError, match="unknown option"):
        hf.replace_sdpa("lara", colour="red")
