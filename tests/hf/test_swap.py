"""`hf.use` and `hf.report` on small models of transformers with random weights."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers

from slowfast_lara import hf
from slowfast_lara.attention import ESTIMATORS
from tests.helpers.comparing import assert_close
from tests.helpers.hf_models import IMAGE, MODELS, SIZES, build, output, timesformer
from tests.helpers.preloaded import environment

over_models = pytest.mark.parametrize("name", MODELS)
NUMBER = 12
FAST = ("vivit", "dinov2_with_registers")  # compiled in the fast tests


def replaced(model, name):
    """Paths of the layers whose last call used the estimator."""
    return [layer for layer, attention in hf.report(model) if attention.startswith(name)]


def without_grad(model, inputs):
    with torch.no_grad():
        return output(model, inputs)


@over_models
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_exact_attention_is_the_models(name, implementation):
    model, inputs = build(name)
    model.set_attn_implementation(implementation)
    expected = without_grad(model, inputs)
    hf.use(model, "softmax")
    assert_close(without_grad(model, inputs), expected, 0 if implementation == "sdpa" else 1e-5)
    assert len(replaced(model, "softmax")) == MODELS[name].layers
    hf.use(model, "exact")
    assert_close(without_grad(model, inputs), expected, 0)
    assert model.config._attn_implementation == implementation
    assert not replaced(model, "softmax")


@over_models
def test_every_estimator_has_finite_gradients(name):
    model, inputs = build(name)
    expected = without_grad(model, inputs)
    for estimator in ESTIMATORS:
        hf.use(model.train(), estimator, num_landmarks=NUMBER)
        model.zero_grad()
        output(model, inputs).square().mean().backward()
        assert len(replaced(model, estimator)) == MODELS[name].layers
        for path, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert parameter.grad.isfinite().all(), (estimator, path)
        out = without_grad(model.eval(), inputs)
        assert out.isfinite().all()
        if estimator not in ("softmax", "performer"):
            relative = (out - expected).norm() / expected.norm()
            assert 1e-6 < relative < 1, estimator


@over_models
def test_layout_of_tokens(name):
    """The report has the prefix tokens and frames by which the model builds its sequence."""
    model, inputs = build(name)
    without_grad(hf.use(model, "merged", groups=NUMBER), inputs)
    _, prefix, frames = MODELS[name][2:]
    patches = {4: 64, 1: 36}[frames]
    words = [f"merged, {NUMBER} groups", f"{prefix + patches} tokens"]
    words += [f"{frames} frames"] * (frames > 1) + [f"prefix {prefix}"] * (prefix > 0)
    for layer in replaced(model, "merged"):
        assert (layer, ", ".join(words)) in hf.report(model)


@over_models
def test_copies_and_saved_models_are_equal(name, tmp_path):
    model, inputs = build(name)
    arguments = ("performer", 3) if name != "vjepa2" else ("lara", 4)
    hf.use(model, arguments[0], num_landmarks=NUMBER, seed=arguments[1])
    expected = without_grad(model, inputs)
    torch.manual_seed(99)
    assert_close(without_grad(copy.deepcopy(model), inputs), expected, 0)
    model.save_pretrained(tmp_path)
    assert "slowfast_lara" not in (tmp_path / "config.json").read_text()
    loaded, messages = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not messages["unexpected_keys"] and not messages["missing_keys"]
    hf.use(loaded, arguments[0], num_landmarks=NUMBER, seed=arguments[1])
    assert_close(without_grad(loaded, inputs), expected, 0)


@pytest.mark.parametrize(
    "name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in MODELS]
)
def test_compile_and_export(name):
    model, inputs = build(name)
    if "pixel_attention_mask" in inputs:
        inputs["pixel_attention_mask"] = None  # see test_compiled_masks_stay_exact
    hf.use(model, "merged", groups=NUMBER)
    expected = without_grad(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(without_grad(compiled, inputs), expected, 1e-5)
    exported = torch.export.export(model, (), inputs, strict=False).module()
    assert_close(without_grad(exported, inputs), expected, 1e-5)


def test_compiled_masks_stay_exact():
    """An exported program cannot test whether a mask has zeros."""
    model, inputs = build("siglip2")
    expected = without_grad(model, inputs)
    hf.use(model, "merged", groups=NUMBER)
    exported = torch.export.export(model, (), inputs, strict=False).module()
    assert_close(without_grad(exported, inputs), expected, 1e-5)


@pytest.mark.slow
def test_compile_with_dynamic_shapes():
    model, inputs = build("vjepa2")
    hf.use(model, "merged", groups=NUMBER)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for frames in (8, 6):
        clips = {key: x[:, :frames] for key, x in inputs.items()}
        assert_close(without_grad(compiled, clips), without_grad(model, clips), 1e-5)


@over_models
def test_gradient_checkpointing(name):
    model, inputs = build(name)
    hf.use(model.train(), "lara", num_landmarks=NUMBER)
    grads = []
    for switch in (model.activation_checkpointing_disable, model.activation_checkpointing_enable):
        switch()
        model.zero_grad()
        torch.manual_seed(5)
        output(model, inputs).square().sum().backward()
        found = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
        grads.append(torch.cat(found))
    assert_close(grads[1] / grads[0].norm(), grads[0] / grads[0].norm(), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model, inputs = build("dinov2")
    hf.use(model, "merged", groups=NUMBER)
    expected = without_grad(model, inputs)
    out = without_grad(model.to(dtype), {key: x.to(dtype) for key, x in inputs.items()})
    assert out.dtype == dtype
    assert (out - expected).norm() < 0.2 * expected.norm()


def test_pickled_model_in_a_new_process(tmp_path):
    model, inputs = build("vit")
    hf.use(model, "performer", num_landmarks=NUMBER)
    expected = without_grad(model, inputs)
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps((model, inputs, expected)))
    program = (
        "import pickle, torch\n"
        f"model, inputs, expected = pickle.load(open({str(file)!r}, 'rb'))\n"
        "with torch.no_grad(): out = model(**inputs).last_hidden_state\n"
        "assert (out - expected).abs().max() <= 1e-6\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["timesformer", "hiera", "plain"])
def test_models_that_do_not_dispatch(name):
    if name == "timesformer":
        model = timesformer()
    elif name == "hiera":
        config = transformers.HieraConfig(
            embed_dim=8, image_size=[64, 64], depths=[1] * 4, num_heads=[1] * 4
        )
        model = transformers.HieraModel(config)
    else:
        model = torch.nn.Linear(2, 2)
    for call in (lambda: hf.use(model, "merged"), lambda: hf.compare(model, torch.randn(1, 2))):
        with pytest.raises(ValueError, match=f"{type(model).__name__} does not dispatch"):
            call()
    assert hf.report(model) == []


def test_cross_attention_and_few_tokens_stay_exact():
    model, inputs = build("vjepa2")
    expected = without_grad(model, inputs)
    without_grad(hf.use(model, "merged", groups=16), inputs)
    cross = "pooler.cross_attention_layer.cross_attn"
    assert dict(hf.report(model))[cross] == "exact: cross attention"
    assert dict(hf.report(model))["vjepa2.predictor.layer.0.attention"] == "not called yet"
    assert_close(without_grad(hf.use(model, "merged", groups=64), inputs), expected, 0)
    reasons = [attention for _, attention in hf.report(model) if "exact" in attention]
    assert len(reasons) == 4
    assert sum("too few tokens: 64 patches, 64" in reason for reason in reasons) == 3


def test_masks_stay_exact():
    model, inputs = build("siglip2")
    inputs["pixel_attention_mask"][1, 30:] = 0
    expected = without_grad(model, inputs)
    assert_close(without_grad(hf.use(model, "merged", groups=NUMBER), inputs), expected, 0)
    assert {attention for _, attention in hf.report(model)} == {"exact: attention mask"}


def test_text_towers_stay_exact():
    """CLIP's text tower is causal; both towers use the same class of attention layers."""
    text = transformers.CLIPTextConfig(vocab_size=50, max_position_embeddings=40, **SIZES)
    vision = transformers.CLIPVisionConfig(**IMAGE, **SIZES)
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8
    )
    model = transformers.CLIPModel(config).eval()
    words = {"input_ids": torch.randint(3, 40, (2, 30))}
    with torch.no_grad():
        expected = model.get_text_features(**words).pooler_output
        hf.use(model, "lara", num_landmarks=NUMBER)
        out = model.get_text_features(**words).pooler_output
        model.get_image_features(torch.randn(2, 3, 48, 48))
    assert_close(out, expected, 0)
    for layer, attention in hf.report(model):
        assert attention.startswith("lara" if layer.startswith("vision") else "exact: "), layer


def test_causal_models_are_refused():
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=20, **sizes))
    with pytest.raises(ValueError, match="LlamaModel does not dispatch"):
        hf.use(model, "merged")
    assert {attention for _, attention in hf.report(model)} == {"exact: causal attention"}


def test_unknown_arguments_stay_exact():
    """A softcap changes the logits of attention."""
    model, inputs = build("vit")
    model.set_attn_implementation("eager")
    expected = without_grad(model, inputs)
    hf.use(model, "merged", groups=NUMBER)
    with torch.no_grad():
        out = model(**inputs, softcap=20.0).last_hidden_state
    assert_close(out, expected, 0)
    expected = {"exact: unsupported argument softcap"}
    assert {attention for _, attention in hf.report(model)} == expected
    with torch.no_grad():  # attention weights exist only in exact attention
        weights = model(**inputs, output_attentions=True).attentions
    assert [tuple(x.shape) for x in weights] == [(2, 3, 37, 37)] * 2


def test_attention_weights_by_the_config():
    """transformers does not pass this flag of a config to its attention functions."""
    model, inputs = build("vit")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with torch.no_grad():
        expected = model(**inputs).attentions
        found = hf.use(model, "merged", groups=NUMBER)(**inputs).attentions
    assert len(found) == len(expected) == 2
    for weights, exact in zip(found, expected):
        assert_close(weights, exact, 0)
    assert {attention for _, attention in hf.report(model)} == {"exact: output_attentions"}


def test_attention_dropout_is_in_the_report():
    model, inputs = build("videomae")
    model.config.attention_probs_dropout_prob = 0.3
    for layer in model.videomae.encoder.layer:
        layer.attention.attention.dropout_prob = 0.3
    output(hf.use(model.train(), "merged", groups=NUMBER), inputs)
    assert all("without attention dropout" in attention for _, attention in hf.report(model))


def test_another_implementation_is_in_the_report():
    model, inputs = build("vit")
    hf.use(model, "merged", groups=NUMBER)
    model.set_attn_implementation("sdpa")
    without_grad(model, inputs)
    assert all("exact: " in attention and "sdpa" in attention for _, attention in hf.report(model))


def test_models_that_share_a_config():
    config = transformers.ViTConfig(**IMAGE, **SIZES)
    first, second = (transformers.ViTModel(config).eval() for _ in range(2))
    images = {"pixel_values": torch.randn(2, 3, 48, 48)}
    expected = without_grad(second, images)
    hf.use(first, "merged", groups=NUMBER)
    assert_close(without_grad(second, images), expected, 0)
    assert {attention for _, attention in hf.report(second)} == {"exact: not replaced"}


def test_layout_by_arguments():
    model, inputs = build("vivit")
    default = without_grad(hf.use(model, "lara", num_landmarks=NUMBER), inputs)
    same = without_grad(hf.use(model, "lara", num_landmarks=NUMBER, prefix=1, frames=4), inputs)
    assert_close(same, default, 0)
    other = without_grad(hf.use(model, "lara", num_landmarks=NUMBER, frames=1), inputs)
    assert (other - default).abs().max() > 1e-6


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"name": "laara"}, ValueError, "laara.*must be one of"),
        ({"name": "merged", "groups": 0}, ValueError, "num_landmarks is 0"),
        ({"name": "merged", "groups": 4, "num_landmarks": 4}, TypeError, "one"),
        ({"name": "merged", "grups": 4}, TypeError, "unknown option 'grups'"),
        ({"name": "merged", "prefix": -1}, ValueError, "prefix is -1"),
        ({"name": "merged", "frames": 0}, ValueError, "frames is 0"),
        ({"name": "merged", "frames": 2.0}, ValueError, "frames is 2.0"),
    ],
)
def test_bad_arguments_leave_the_model_unchanged(arguments, error, message):
    model, inputs = build("vit")
    hf.use(model, "merged", groups=NUMBER)
    expected = without_grad(model, inputs)
    with pytest.raises(error, match=message):
        hf.use(model, **arguments)
    assert_close(without_grad(model, inputs), expected, 0)


def test_report_is_one_line_per_layer():
    model, inputs = build("dinov2")
    without_grad(hf.use(model, "merged", groups=NUMBER), inputs)
    lines = str(hf.report(model)).splitlines()
    assert len(lines) == 2
    assert all("attention: merged, 12 groups" in line for line in lines)
    json.dumps(hf.report(model))  # plain data
