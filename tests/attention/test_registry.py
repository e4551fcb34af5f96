"""Properties of every registered estimator, with each of its options."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from slowfast_lara import attention
from slowfast_lara.attention import (
    ESTIMATORS,
    Estimator,
    build_estimator,
    estimator_options,
    register,
)
from tests.helpers.comparing import assert_close


def all_options(name):
    """Every combination of the options with listed values and of the booleans."""
    options = estimator_options(name)
    values = {
        key: option.choices or ((False, True) if isinstance(option.default, bool) else ())
        for key, option in options.items()
    }
    values = {key: value for key, value in values.items() if value}
    return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


CASES = [(name, options) for name in ESTIMATORS for options in all_options(name)]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" for name, options in CASES]
over_all = pytest.mark.parametrize("name, options", CASES, ids=IDS)


def build(name, options, **sizes):
    torch.manual_seed(0)
    sizes = {"head_dim": 8, "num_heads": 2, "num_landmarks": 6, **sizes}
    return build_estimator(name, **sizes, **options)


def inputs(scale=1.0, B=2, h=2, F=3, P=7, d=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, B, h, F * P, d, generator=generator)
    return q * scale, k * scale, v


@over_all
@pytest.mark.parametrize("training", [True, False])
def test_output_shape_and_dtype(name, options, training):
    estimator = build(name, options).train(training)
    q, k, v = inputs()
    for num_frames in (1, 3):
        out = estimator(q, k, v, num_frames=num_frames)
        assert out.shape == (2, 2, 21, num_frames, 8)
        assert out.dtype == torch.float32
    assert estimator(q, k, v).shape[3] == 1


@over_all
@pytest.mark.parametrize("scale", [1, 10, 100, 1000])
@pytest.mark.parametrize("training", [True, False])
def test_any_scale_is_finite_and_inside_the_range_of_the_values(name, options, scale, training):
    estimator = build(name, options).train(training)
    given = [x.requires_grad_() for x in inputs(scale)]
    out = estimator(*given, num_frames=3)
    assert out.isfinite().all()
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in given)
    assert all(p.grad is None or p.grad.isfinite().all() for p in estimator.parameters())
    if name != "nystrom":  # its weights may be negative
        values = given[2].detach().unflatten(2, (3, 7))
        low, high = values.amin(3)[:, :, None], values.amax(3)[:, :, None]  # [B,h,1,F,d]
        assert (out >= low - 1e-5).all()
        assert (out <= high + 1e-5).all()


@over_all
@pytest.mark.parametrize("training", [True, False])
def test_same_seed_same_output(name, options, training):
    outputs = []
    for _ in range(2):
        estimator = build(name, options).train(training)
        torch.manual_seed(11)
        outputs.append(estimator(*inputs(), num_frames=3))
    assert_close(outputs[0], outputs[1], 0.0)


@over_all
def test_eval_is_deterministic_and_keeps_the_global_random_state(name, options):
    before = torch.random.get_rng_state()
    estimator = build_estimator(name, head_dim=8, num_heads=2, num_landmarks=6, **options).eval()
    if not list(estimator.parameters()):  # parameters are drawn from the global generator
        assert torch.equal(torch.random.get_rng_state(), before)
    before = torch.random.get_rng_state()
    first = estimator(*inputs(), num_frames=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_close(estimator(*inputs(), num_frames=3), first, 0.0)


@over_all
def test_training_does_not_reseed_the_global_random_state(name, options):
    """After the same number of draws, different seeds give different numbers."""
    after = []
    for seed in (1, 2):
        estimator = build(name, options)
        torch.manual_seed(seed)
        estimator(*inputs(), num_frames=3)
        after.append(torch.rand(1).item())
    assert after[0] != after[1]


@over_all
def test_an_eval_output_does_not_depend_on_the_batch(name, options):
    estimator = build(name, options).eval()
    q, k, v = inputs(B=3)
    whole = estimator(q, k, v, num_frames=3)
    for b in range(3):
        alone = estimator(*(x[b : b + 1] for x in (q, k, v)), num_frames=3)
        assert_close(alone, whole[b : b + 1], 1e-5)


RANDOM = [case for case in CASES if case[0] in ("lara", "ra", "performer", "eva")]


@pytest.mark.parametrize("name, options", RANDOM)
def test_every_training_call_draws_new_samples(name, options):
    estimator = build(name, options)
    torch.manual_seed(0)
    first, second = (estimator(*inputs(), num_frames=3) for _ in range(2))
    assert (first - second).abs().max() > 1e-3


@over_all
def test_half_precision_computes_in_float32(name, options):
    """bfloat16 inputs give float32's result on the same numbers, rounded once."""
    estimator = build(name, options).eval()
    rounded = [x.bfloat16() for x in inputs()]
    expected = estimator(*(x.float() for x in rounded), num_frames=3)
    out = estimator(*rounded, num_frames=3)
    assert out.dtype == torch.bfloat16
    atol = 4e-2 if name == "softmax" else 1e-2  # softmax calls a bfloat16 kernel
    assert_close(out, expected, atol)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(estimator(*rounded, num_frames=3), expected, atol)


def test_performer_samples_are_in_the_state_dict():
    one = build("performer", {}, seed=1).eval()
    other = build("performer", {}, seed=2).eval()
    assert (one(*inputs()) - other(*inputs())).abs().max() > 1e-3
    other.load_state_dict(one.state_dict())
    assert_close(other(*inputs()), one(*inputs()), 0.0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_repr_shows_all_settings(name):
    options = all_options(name)[-1]
    estimator = build_estimator(name, head_dim=8, num_landmarks=5, **options)
    text = repr(estimator).replace("\n", "")
    assert text.startswith(f"{type(estimator).__name__}(")
    defaults = {key: option.default for key, option in estimator_options(name).items()}
    for key, value in {**defaults, **options}.items():
        assert f"{key}={value!r}" in text
    if not estimator.exact and name != "ra":
        assert "num_landmarks=5" in text


def test_repr_fits_on_a_line():
    estimator = build_estimator("lara", head_dim=64, num_landmarks=128, proposal="global")
    assert "\n" not in repr(estimator) and "num_landmarks=128, proposal='global'" in repr(estimator)


def test_errors_list_the_allowed_names_and_values():
    with pytest.raises(ValueError, match="'laura'; must be one of softmax, lara, ra"):
        build_estimator("laura", head_dim=8)
    with pytest.raises(TypeError, match="'betta' of lara; its options: proposal"):
        build_estimator("lara", head_dim=8, betta=2.0)
    with pytest.raises(ValueError, match="proposal of lara is 'loca'; must be one of local"):
        build_estimator("lara", head_dim=8, proposal="loca")
    with pytest.raises(ValueError, match="num_landmarks is 0; must be .* at least 1"):
        build_estimator("lara", head_dim=8, num_landmarks=0)
    assert build_estimator("lara", head_dim=8, beta=2).beta == 2.0


def test_a_registered_class_gets_config_keys_and_runs_in_the_model(tmp_path):
    from slowfast_lara.config import load_config
    from slowfast_lara.errors import ConfigError
    from slowfast_lara.models import build_model

    @register("mean")
    class MeanAttention(Estimator):
        def __init__(self, *, sharpness: float = 1.0) -> None:
            super().__init__()
            self.sharpness = sharpness

        def forward(self, q, k, v, *, num_frames=1):
            means = v.unflatten(2, (num_frames, -1)).mean(3)
            return means.unsqueeze(2).expand(-1, -1, q.shape[2], -1, -1)

    try:
        path = tmp_path / "mean.yaml"
        path.write_text(
            "VIT: {APPROX_ATTN_TYPE: mean, MEAN: {SHARPNESS: 3}, EMBED_DIM: 24, NUM_HEADS: 2, "
            "DEPTH: 1, TEMPORAL_RESOLUTION: 2}\nDATA: {NUM_FRAMES: 4}\nNUM_GPUS: 0\n"
        )
        model = build_model(load_config(path))
        assert model.blocks[0].attn.estimator.sharpness == 3.0
        assert model([torch.zeros(1, 3, 4, 32, 32)]).isfinite().all()
        with pytest.raises(ConfigError, match="VIT.MEAN.SHARPNESS is -1.0; .*finite number"):
            load_config(path, ["VIT.MEAN.SHARPNESS", "-1"])
        register("mean")(MeanAttention)  # again, as a notebook cell does
        for name in ("mean", "lara"):
            with pytest.raises(ValueError, match="already registered"):
                register(name)(type("OtherAttention", (MeanAttention,), {}))
        with pytest.raises(ValueError, match="identifier"):
            register("mean-1")(MeanAttention)
    finally:
        del ESTIMATORS["mean"]


def test_the_recipe_in_the_docs_works():
    page = Path(attention.__file__).parents[2] / "docs" / "extend.md"
    code = re.search(r'```python\n("""Strided.*?)```', page.read_text("utf-8"), re.DOTALL).group(1)
    try:
        exec(compile(code, page.name, "exec"), {})
        q, k, v = inputs()
        out = build_estimator("strided", head_dim=8)(q, k, v, num_frames=3)
        keys, values = (x.unflatten(2, (3, 7))[:, :, :, ::2].flatten(2, 3) for x in (k, v))
        assert_close(
            out, build_estimator("softmax", head_dim=8)(q, keys, values, num_frames=3), 0.0
        )
    finally:
        del ESTIMATORS["strided"]
