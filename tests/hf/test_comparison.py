"""`hf.compare`: errors and costs of attentions on the q, k, v of a model."""

import math

import pytest
import torch

from slowfast_lara import hf
from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.hf.comparison import ComparedAttention, Comparison
from tests.helpers.comparing import assert_close
from tests.helpers.hf_models import MODELS, build, output


@pytest.mark.parametrize("name", ["videomae", "vjepa2", "clip"])
def test_all_attentions(name):
    model, inputs = build(name)
    comparison = hf.compare(model, inputs[model.main_input_name], numbers=(8, 16))
    settings = {(entry.attention, entry.number) for entry in comparison}
    assert settings == {(x, n) for x in ESTIMATORS if x not in ("softmax", "ra") for n in (8, 16)}
    for entry in comparison:
        assert len(entry.errors) == MODELS[name].layers
        assert math.isfinite(entry.error) and entry.error > 0
        assert entry.share > 0
    best = comparison.nearest()
    assert best is not None and best.share <= 0.5
    assert f'hf.use(model, "{best.attention}", groups={best.number})' in str(comparison)


def test_error_and_cost_of_one_layer():
    """An error of 0 for exact attention; the error of `use` in a model of one layer."""
    model, inputs = build("vit")
    layer = model.layers[0].attention
    seen = {}
    hook = layer.register_forward_hook(lambda m, x, out: seen.setdefault("out", out[0]))
    with torch.no_grad():
        comparison = hf.compare(model, inputs, attentions=("softmax", "merged"), numbers=(12,))
    hook.remove()
    exact, merged = comparison
    assert exact.error < 1e-12 and exact.share == pytest.approx(1)
    # Projections are linear, so an identity makes the layer's output the attention's.
    torch.nn.init.eye_(layer.o_proj.weight)
    torch.nn.init.zeros_(layer.o_proj.bias)
    outs = []
    for name in ("softmax", "merged"):
        hook = layer.register_forward_hook(lambda m, x, out: outs.append(out[0]))
        with torch.no_grad():
            output(hf.use(model, name, groups=12), inputs)
        hook.remove()
    squares = (outs[1] - outs[0]).square().sum() / outs[0].square().sum()
    path = next(iter(merged.errors))
    assert merged.errors[path] == pytest.approx(squares.item(), rel=1e-4)


def test_one_name():
    model, inputs = build("vit")
    one, listed = (hf.compare(model, inputs, attentions=x) for x in ("merged", ["merged"]))
    assert list(one) == list(listed) and one[0].attention == "merged"


def test_clips_that_are_not_finite_are_refused():
    model, inputs = build("vit")
    clips = torch.full_like(inputs[model.main_input_name], torch.nan)
    with pytest.raises(ValueError, match="finite"):
        hf.compare(model, clips, attentions="merged")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_unchanged(implementation):
    model, inputs = build("videomae")
    model.set_attn_implementation(implementation)
    hf.use(model, "lara", num_landmarks=8)
    with torch.no_grad():
        expected = output(model, inputs)
        hf.compare(model, inputs, attentions=("merged",), numbers=(8,))
        assert_close(output(model, inputs), expected, 0)
    assert all(attention.startswith("lara") for _, attention in hf.report(model))
    for bad, error in (({"numbers": (0.5,)}, ValueError), ({"attentions": ("no",)}, ValueError)):
        with pytest.raises(error):
            hf.compare(model, inputs, **bad)
    with torch.no_grad():
        assert_close(output(model, inputs), expected, 0)


def test_too_few_tokens():
    model, inputs = build("vit")
    comparison = hf.compare(model, inputs, numbers=(36, 1000))
    assert comparison == []
    assert "no attention" in str(comparison)


def test_an_error_that_is_not_finite_is_not_recommended():
    errors = {"a": math.nan, "b": 0.5, "c": math.inf}
    rows = Comparison(ComparedAttention(name, 8, 0.1, {"layer": x}) for name, x in errors.items())
    assert rows.nearest().attention == "b" and 'hf.use(model, "b", groups=8)' in str(rows)
    del rows[1]
    assert rows.nearest() is None and "hf.use" not in str(rows)
